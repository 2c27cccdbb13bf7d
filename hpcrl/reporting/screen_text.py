"""Text that others wrote, in a form that a screen or a log shows and does not obey.

A rollout, a log, a name or an error message can hold any character: sequences that clear the screen, write into the
clipboard or move the cursor, or that reverse the order in which text is shown. Here they become visible.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    # C0 controls but tab and line feed; DEL and C1 controls
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    # line and paragraph separators; marks, embeddings, overrides and isolates of the writing direction
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    # lone surrogates, which no encoding writes; tags, which are never shown
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def visible(text: str) -> str:
    r"""Return ``text`` with each character that a terminal obeys in the form ``\x1b`` or ``\u202e``.

    Line feeds and tabs stay. Characters that are legal in a JSON string get the form that JSON reads as the same
    character, so that a JSON document stays equal.
    """
    return _UNSAFE.sub(_form, text) if _UNSAFE.search(text) else text


def visible_line(text: str, limit: int | None = None) -> str:
    r"""Return the same in one line: line feeds and tabs become ``\n`` and ``\t``.

    Parameters
    ----------
    limit:
        Maximum number of characters that are returned; an ellipsis stands for the rest. None: no limit.
    """
    shown = visible(text if limit is None else text[: limit + 1]).replace("\n", "\\n").replace("\t", "\\t")
    return shown if limit is None or len(shown) <= limit else shown[: limit - 1] + "…"


def without_colours(text: str) -> str:
    """Return ``text`` without the sequences that set colours, as most programs write them into logs."""
    return _COLOUR.sub("", text)


def _form(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return "\\r" if code == 0x0D else f"\\x{code:02x}"
    if code > 0xFFFF:
        high, low = 0xD800 + (code - 0x10000 >> 10), 0xDC00 + (code - 0x10000 & 0x3FF)
        return f"\\u{high:04x}\\u{low:04x}"
    return f"\\u{code:04x}"
