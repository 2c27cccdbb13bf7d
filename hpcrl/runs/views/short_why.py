"""The three lines of ``hpcrl why`` that a message about a run has."""

from __future__ import annotations

from hpcrl.errors import HpcrlError
from hpcrl.reporting.screen_text import visible_line
from hpcrl.runs.registry import reference
from hpcrl.runs.run_progress import read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.diagnosis import diagnose

_LINE = 300
"""Maximum characters of a line."""


def short_why(run: RunDir, *, sentence: str = "", evidence: str = "") -> tuple[str, str, str]:
    """Return what happened, the evidence or the reason, and the next command, a line each.

    Parameters
    ----------
    sentence, evidence:
        The first two lines where they are known. Where they are empty the diagnosis of the run has them; a run that
        cannot be read gives the command alone.
    """
    way = f"hpcrl why {run.name}"
    try:
        way = f"hpcrl why {reference(run)}"
        found = diagnose(run)
        ended = found.state.ended
        sentence = sentence or found.sentence
        words = [line for line in found.last_words if line.strip()]
        evidence = evidence or found.hint or (words[-1].strip() if words and ended else "") or _progress(run)
        if ended and found.ways_on:
            way = found.ways_on[0]
    except (HpcrlError, OSError, ValueError, KeyError):
        sentence = sentence or "the run cannot be read now"
    lines = (sentence, evidence or "nothing else is recorded", way)
    first, second, third = (visible_line(line, _LINE) for line in lines)
    return first, second, third


def _progress(run: RunDir) -> str:
    progress = read_progress(run)
    checkpoint = (
        "no checkpoint" if progress.checkpoint_step is None else f"checkpoint of step {progress.checkpoint_step}"
    )
    reward = "" if progress.last is None else f", reward {progress.last.reward_mean:.4g}"
    held_out = f", held-out {progress.evaluations[-1].reward:.4g}" if progress.evaluations else ""
    return f"step {progress.steps} of {progress.total_steps}{reward}{held_out}, {checkpoint}"
