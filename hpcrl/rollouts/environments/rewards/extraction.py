r"""Extraction of the answer from a text, in one pass over the text.

``last_line``: the last line that is not blank. ``last_number``: the last number, as it is written. ``boxed``: the
content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces are closed; ``\boxed 5`` is read as well.
``hashes``: the rest of the line after the last ``####``, as in GSM8K. ``answer_tag``: the content of the last
``<answer>...</answer>``.
"""

from __future__ import annotations

import re

from hpcrl.config.rewards import Extraction
from hpcrl.rollouts.environments.rewards.numbers import last_number_text

_HASHES, _OPEN, _CLOSE = "####", "<answer>", "</answer>"
FENCE = "```"
_BOXED = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s{0,4}(?:\{|(-?\d+(?:[.,/]\d+)*|[A-Za-z](?!\w)))")
"""Beginning of a box, or a box of a number or a letter without braces."""


def extract(text: str, part: Extraction) -> str | None:
    """Return the part of a text without blanks around it; None where the text has none, or an empty one."""
    found: str | None
    match part:
        case "all":
            found = text
        case "last_line":
            found = text.rstrip().rpartition("\n")[2]
        case "last_number":
            found = last_number_text(text)
        case "boxed":
            found = _last_boxed(text)
        case "hashes":
            _, mark, rest = text.rpartition(_HASHES)
            found = rest.partition("\n")[0] if mark else None
        case "answer_tag":
            end = text.rfind(_CLOSE)
            begin = text.rfind(_OPEN, 0, max(end, 0))
            found = None if begin < 0 else text[begin + len(_OPEN) : end]
    return (found or "").strip() or None


def last_fenced_block(text: str) -> tuple[str | None, bool]:
    """Return the last closed block between lines with fences, or None, and whether one is open at the end.

    A line that has a fence at its begin and another one behind it is code within a line, as in Markdown.
    """
    found: str | None = None
    inside: list[str] | None = None
    for line in text.split("\n"):
        begin = line.lstrip()
        if not begin.startswith(FENCE):
            if inside is not None:
                inside.append(line)
        elif inside is not None:
            found, inside = "\n".join(inside), None
        elif "`" not in begin.lstrip("`"):
            inside = []
    return found, inside is not None


def _last_boxed(text: str) -> str | None:
    """Return the content of the last closed box; escaped braces do not count."""
    found: str | None = None
    begins: list[int] = []
    depths: list[int] = []
    depth = position = 0
    while position < len(text):
        if text[position] == "\\" and (box := _BOXED.match(text, position)):
            position = box.end()
            if box[1] is not None:
                found = box[1]
                continue
            depth += 1
            begins.append(position)
            depths.append(depth)
            continue
        character = text[position]
        if character == "\\":
            position += 2
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            if depths and depths[-1] == depth:
                begin = begins.pop()
                depths.pop()
                found = text[begin:position]
            # an unmatched closing brace in earlier text must not close a box
            depth = max(0, depth - 1)
        position += 1
    return found
