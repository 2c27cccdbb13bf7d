"""Conversations on a screen: who says what stands in a column of its own, which no text of others can write into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcrl.cli.output import json_text, table_console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpcrl.runs.rundir import RunDir

__all__ = ["KIND_STYLES", "message_pieces", "print_pieces", "turns_in_pieces"]

KIND_STYLES = {
    "control": "cyan",
    "said": "",
    "system": "",
    "user": "",
    "tool": "blue",
    "tool result": "blue",
    "thinking": "italic magenta",
    "text": "bold",
    "assistant": "bold",
    "tool call": "yellow",
    "bad call": "red",
    "problem": "red",
}
"""How the kinds of `hpcrl.rollouts.rendering.spoken`, and roles, look in colour."""
_WIDTH = max(map(len, KIND_STYLES))
_MODULE = "hpcrl.rollouts.rendering.spoken"
_LONGEST_S = 120.0


def message_pieces(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a message of an environment as kinds and texts: thinking, what is said, and each tool call."""
    role, name, content = str(message.get("role")), message.get("name"), message.get("content")
    calls = message.get("tool_calls") or []
    pieces = [("thinking", str(message["reasoning_content"]))] if message.get("reasoning_content") else []
    if content or not (calls or pieces):
        text = content if isinstance(content, str) else "" if content is None else json_text(content)
        pieces.append((f"{role} ({name})" if name else role, text))
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        known = function if isinstance(function, dict) else {}
        arguments = known.get("arguments", call)
        said = arguments if isinstance(arguments, str) else json_text(arguments, indent=None)
        pieces.append(("tool call", f"{known.get('name', '')} {said}".strip()))
    return pieces


def print_pieces(pieces: Iterable[tuple[str, str]]) -> None:
    """Print kinds and texts, a kind in the first column and its text in the second."""
    from rich.table import Table
    from rich.text import Text

    from hpcrl.screen_text import visible

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for kind, text in pieces:
        style = KIND_STYLES.get(kind, "")
        table.add_row(Text(kind.ljust(_WIDTH), style="dim"), Text(visible(text), style=style))
    table_console().print(table)


def turns_in_pieces(
    run: RunDir, turns: list[tuple[list[int], list[int]]]
) -> list[tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
    """Return what was said before each turn and the turn, as kinds and texts.

    The interpreter of the run's orchestrator knows thinking and calls. Without it control tokens are apart from text;
    without a tokenizer tokens are numbers.
    """
    from hpcrl.errors import HpcrlError

    try:
        return [(each["said"], each["sampled"]) for each in _ask(run, turns)]
    except (HpcrlError, OSError, ValueError, KeyError):  # a run of another place, or one that is not whole
        pass
    try:
        from pathlib import Path

        from hpcrl.models.token_pieces import pieces_of
        from hpcrl.models.tokenizer import ChatTokenizer

        tokenizer = ChatTokenizer(Path(run.recipe().model.path))
        return [
            ([*pieces_of(tokenizer, said, "said")], [*pieces_of(tokenizer, sampled, "text")]) for said, sampled in turns
        ]
    except Exception:  # noqa: BLE001 - the tokenizers package raises bare exceptions; tokens are shown without it
        return [([("said", str(said))], [("text", str(sampled))]) for said, sampled in turns]


def _ask(run: RunDir, turns: list[tuple[list[int], list[int]]]) -> list[Any]:
    from hpcrl.errors import UsageError
    from hpcrl.jobplan.role_python import ask_role_python, hidden_reason

    plan, site, recipe = run.plan(), run.cluster(), run.recipe()
    if reason := hidden_reason(plan, site, what="chat formats"):
        raise UsageError(reason)
    request = {"model_dir": recipe.model.path, "chat": recipe.model.chat.model_dump(mode="json"), "turns": turns}
    answer = ask_role_python(
        _MODULE, request=request, plan=plan, site=site, doing="read the turns", timeout_s=_LONGEST_S, slow_hint=""
    )
    return list(answer["turns"])
