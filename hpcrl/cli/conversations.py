"""Conversations on a screen: who says what stands in a column of its own, which no text of others can write into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcrl.cli.output import json_text, table_console

if TYPE_CHECKING:
    from collections.abc import Iterable

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
"""Colours of roles and of the kinds of `hpcrl.rollouts.rendering.spoken`."""
_WIDTH = max(map(len, KIND_STYLES))


def message_pieces(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a message of an environment as kinds and texts: thinking, content, and each tool call."""
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

    from hpcrl.reporting.screen_text import visible

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for kind, text in pieces:
        style = KIND_STYLES.get(kind, "")
        table.add_row(Text(kind.ljust(_WIDTH), style="dim"), Text(visible(text), style=style))
    table_console().print(table)
