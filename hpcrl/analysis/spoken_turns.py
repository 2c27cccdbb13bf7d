"""Turns of a rollout as kinds and texts: messages, thinking, tool calls and their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.runs.rundir import RunDir

Pieces = list[tuple[str, str]]
"""Kinds and texts, in order."""
_MODULE = "hpcrl.rollouts.rendering.spoken"
_LONGEST_S = 120.0


def turns_in_pieces(run: RunDir, turns: list[tuple[list[int], list[int]]]) -> list[tuple[Pieces, Pieces]]:
    """Return the messages before each turn and the turn, as kinds and texts.

    The interpreter of the run's orchestrator knows thinking and calls. Files of the run name it, so that it is only
    started for this user's own runs. Without it control tokens are apart from text; without a tokenizer tokens are
    numbers.
    """
    try:
        if run.is_own:
            return [(each["said"], each["sampled"]) for each in _ask(run, turns)]
    except (HpcrlError, OSError, ValueError, KeyError):  # a run on another machine, or an incomplete one
        pass
    try:
        from hpcrl.models.token_pieces import pieces_of  # noqa: PLC0415 - needs an extra
        from hpcrl.models.tokenizer import ChatTokenizer  # noqa: PLC0415 - needs an extra

        tokenizer = ChatTokenizer(Path(run.recipe().model.path))
        return [
            ([*pieces_of(tokenizer, said, "said")], [*pieces_of(tokenizer, sampled, "text")]) for said, sampled in turns
        ]
    except Exception:  # noqa: BLE001 - the tokenizers package raises bare exceptions; tokens are shown without it
        return [([("said", str(said))], [("text", str(sampled))]) for said, sampled in turns]


def _ask(run: RunDir, turns: list[tuple[list[int], list[int]]]) -> list[Any]:
    from hpcrl.jobplan.role_python import ask_role_python, hidden_reason  # noqa: PLC0415 - slow to import

    plan, site, recipe = run.plan(), run.cluster(), run.recipe()
    if reason := hidden_reason(plan, site, what="chat formats"):
        raise UsageError(reason)
    request = {"model_dir": recipe.model.path, "chat": recipe.model.chat.model_dump(mode="json"), "turns": turns}
    answer = ask_role_python(
        _MODULE, request=request, plan=plan, site=site, doing="read the turns", timeout_s=_LONGEST_S, slow_hint=""
    )
    return list(answer["turns"])
