"""Report of what bounds a step: three lines and two tables, as text and as a document."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hpcrl.analysis.bounds.rollout_states import TimeHolder, delayed_environments
from hpcrl.analysis.bounds.step_bound import (
    TRAINER,
    StepWindow,
    environments_of,
    largest_side,
    part_label,
    read_windows,
)
from hpcrl.analysis.bounds.tried_settings import MEASURED_STEPS, NOTICED, TriedSettings, try_settings
from hpcrl.errors import HpcrlError
from hpcrl.planning.calibration.calibration_file import load_site_calibration
from hpcrl.planning.report import find_facts, make_outlook
from hpcrl.runs.observe import observe
from hpcrl.runs.progress import RoleProgress, progress_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

SLOW_SCHEMA = "hpcrl.why_slow/1"
WIDTH = 100
_SHOWN = 5e-4
"""Smallest share of a step with a row of its own."""
_CLOSE = 0.75
"""Share of the largest side from which the second one is named, too."""


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of ``hpcrl plan`` for the recipe and the cluster profile of the run.

    Attributes
    ----------
    step_s, trainer_s, rollout_s:
        Seconds of a step, and of the work of each side alone; None where there is no forecast.
    bound:
        The slower side: ``trainer`` or ``rollouts``.
    because:
        Reason why there is no forecast; else empty.
    """

    step_s: float | None = None
    trainer_s: float | None = None
    rollout_s: float | None = None
    bound: str = ""
    because: str = ""


class SlowReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of the parts that bound a step of a run.

    Attributes
    ----------
    over_run, now:
        Where the time of a step went, without the first steps, and in the newest.
    bound, bound_now:
        The side with most of the time.
    doing:
        What the trainer does at this moment, and for how many seconds; empty where the run does not run.
    lines:
        The three lines.
    """

    schema: str
    name: str
    over_run: StepWindow
    now: StepWindow
    bound: str
    bound_now: str
    doing: str
    plan: PlannedStep
    settings: TriedSettings
    lines: list[str]
    notes: list[str]


def slow_report(run: RunDir, progress: Callable[[float], None] = lambda share: None) -> SlowReport:
    """Find what bounds a step.

    Parameters
    ----------
    progress:
        Called with the finished share of the simulations, from 0 to 1.

    Raises
    ------
    UsageError
        The run has no step yet.
    """
    over_run, now = read_windows(run)
    plan, settings = _planned(run), try_settings(run, progress)
    doing = _doing(run)
    first = f"steps {over_run.first}-{over_run.last}: {_seconds(over_run.step_s)}, {_bound_words(run, over_run)}"
    second = f"now, steps {now.first}-{now.last}: {_seconds(now.step_s)}, {_bound_words(run, now)}"
    return SlowReport(
        schema=SLOW_SCHEMA,
        name=run.name,
        over_run=over_run,
        now=now,
        bound=largest_side(over_run)[0],
        bound_now=largest_side(now)[0],
        doing=doing,
        plan=plan,
        settings=settings,
        lines=[first, second + (f"; {doing}" if doing else ""), f"{_plan_words(plan)}; {_advice(settings)}"],
        notes=_notes(run, over_run, settings),
    )


def slow_document(report: SlowReport) -> dict[str, Any]:
    """Return the report as a document (schema `SLOW_SCHEMA`)."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found


def slow_lines(report: SlowReport) -> Iterator[str]:
    """Yield the text of a report: three lines, the table of a step's time, and that of settings."""
    yield from report.lines
    yield ""
    over_run, now = report.over_run, report.now
    yield f"{'time of a step':<26}{'seconds':>10}{'share':>8}{'now':>10}{'share':>8}  of"
    latest = {part.name: part for part in now.parts}
    names = [*(part.name for part in over_run.parts), *(part.name for part in now.parts)]
    whole = {part.name: part for part in over_run.parts}
    for name in dict.fromkeys(names):
        one, other = whole.get(name), latest.get(name)
        if all(part is None or part.share < _SHOWN for part in (one, other)):
            continue
        of = ", ".join((one or other).by_environment) if one or other else ""  # type: ignore[union-attr]
        cells = "".join(
            f"{0.0 if part is None else part.seconds:>10.3g}{0.0 if part is None else part.share:>8.1%}"
            for part in (one, other)
        )
        yield _cut(f"{_row_label(name):<26}{cells}  {of}".rstrip())
    yield f"{'all':<26}{over_run.step_s:>10.3g}{1:>8.1%}{now.step_s:>10.3g}{1:>8.1%}"
    if report.settings.noticed():
        yield ""
        yield f"{'what would change a step':<58}{'to seconds':>12}{'by':>8}"
        for each in report.settings.noticed():
            mark = "" if each.kind == "setting" else "if: "
            yield _cut(f"{mark + each.change:<58}{each.step_s:>12.3g}{each.effect:>+8.0%}")
    if report.notes:
        yield ""
    for note in report.notes:
        yield from _wrapped(note)


def _row_label(name: str) -> str:
    if name in {holder.value for holder in TimeHolder}:
        words = {"batch": "building the batch", "unknown": "unknown"}.get(name, name)
        return f"wait: {words}"
    return {"publish": "publish (hand-off)"}.get(name, part_label(name))


def _bound_words(run: RunDir, window: StepWindow) -> str:
    """Return the side that bounds a step in words, with the next one."""
    sides = list(window.sides().items())
    words = f"bound by {_side_words(run, window, *sides[0])}"
    if len(sides) > 1:
        joint = " and nearly as much " if sides[1][1] >= _CLOSE * sides[0][1] else ", then "
        words += joint + _side_words(run, window, *sides[1])
    return words


def _side_words(run: RunDir, window: StepWindow, side: str, share: float) -> str:
    largest = next(part for part in window.parts if part.side == side)
    of = ""
    if side == TRAINER:
        of = part_label(largest.name)
    elif side == TimeHolder.HAND_OFF:
        of = "publish" if largest.name == "publish" else "waiting for engines"
    elif side == TimeHolder.ADMISSION:
        of = "no room for the next batch"
    elif side in (TimeHolder.ENVIRONMENTS, TimeHolder.SANDBOXES, TimeHolder.JUDGE):
        delayed = delayed_environments(run.recipe()) if side == TimeHolder.ENVIRONMENTS else {}
        of = environments_of(
            window, side, lambda name: f"{name}, latency {delayed[name]:g} s" if name in delayed else name
        )
    return f"{side} ({share:.0%}{': ' if of else ''}{of})"


def _planned(run: RunDir) -> PlannedStep:
    """Return what ``hpcrl plan`` says today of the run's recipe and profile, without what the run measured."""
    recipe, cluster = run.recipe(), run.cluster()
    try:
        outlook = make_outlook(recipe, cluster, load_site_calibration(cluster), find_facts(recipe))
    except (HpcrlError, OSError) as error:
        return PlannedStep(because=str(error).partition("\n")[0])
    if outlook.loop is None:
        return PlannedStep(because=outlook.because.partition(";")[0] or "a number is missing")
    loop = outlook.loop
    return PlannedStep(step_s=loop.step_s, trainer_s=loop.trainer_s, rollout_s=loop.rollout_s, bound=loop.bound)


def _plan_words(plan: PlannedStep) -> str:
    if plan.step_s is None or plan.trainer_s is None or plan.rollout_s is None:
        return f"plan: none, {plan.because}"
    sides = f"trainer {_seconds(plan.trainer_s)}, rollouts {_seconds(plan.rollout_s)}"
    return f"plan: {_seconds(plan.step_s)}, bound by {plan.bound} ({sides})"


def _advice(settings: TriedSettings) -> str:
    if settings.because:
        return f"what would help is unknown: {settings.because}"
    shorter = [each for each in settings.noticed() if each.effect < 0]
    better = [each for each in shorter if each.kind == "setting"][:2]
    if not better:
        worth = next((f", {each.change} would ({each.effect:+.0%})" for each in shorter), "")
        return f"no setting of the {settings.count} changes tried shortens a step by {NOTICED:.0%}{worth}"
    words = ", ".join(f"{each.change} ({each.effect:+.0%})" for each in better)
    return f"shorter with {words}"


def _doing(run: RunDir) -> str:
    """Return what the trainer does at this moment; empty where the run does not run, or does not say it."""
    view = observe(run)
    if view.state is not RunState.RUNNING:
        return ""
    progress = RoleProgress.read(progress_path(run, view.attempt, "trainer", 0))
    if progress is None:
        return ""
    return f"at this moment {progress.words()}, reported {max(0.0, time.time() - progress.time_s):.0f} s ago"


def _notes(run: RunDir, window: StepWindow, settings: TriedSettings) -> list[str]:
    notes = []
    if window.attributed < window.steps:
        notes.append(
            f"waits were attributed in {window.attributed:,} of {window.steps:,} steps; waits of other steps are "
            "divided in the same proportion, or unknown"
        )
    if delayed_environments(run.recipe()):
        notes.append("an injected latency counts as the environment's, the judge of such an environment included")
    if not run.cluster().uses_slurm:
        notes.append("all roles share this machine: what one of them takes of its processors lengthens the others")
    if settings.note:
        notes.append(settings.note)
    if settings.tried:
        notes.append(
            f"{settings.count} changes were simulated with durations of this run's newest steps, {MEASURED_STEPS} at "
            f"most; the table has those of at least {NOTICED:.0%}, and 'if' is a supposition, not a setting"
        )
    return notes


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _wrapped(text: str) -> Iterator[str]:
    line = ""
    for word in text.split():
        if len(line) + len(word) + 1 > WIDTH:
            yield line.rstrip()
            line = ""
        line += word + " "
    yield line.rstrip()
