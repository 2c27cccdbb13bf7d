r"""Which part of a text is an answer, in one pass over the text.

``last_line``: the last line that is not blank. ``last_number``: the last number, as it is written. ``boxed``: what is
in the last ``\boxed{...}`` whose braces are closed. ``hashes``: the rest of the line behind the last ``####``, as in
GSM8K. ``answer_tag``: what is in the last ``<answer>...</answer>``.
"""

from __future__ import annotations

from hpcrl.config.rewards import Extraction
from hpcrl.rollouts.environments.rewards.numbers import last_number_text

__all__ = ["extract"]

_BOXED, _HASHES, _OPEN, _CLOSE = "\\boxed{", "####", "<answer>", "</answer>"


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


def _last_boxed(text: str) -> str | None:
    """Return what is in the last box that is closed; an escaped brace opens and closes nothing."""
    found: str | None = None
    begins: list[int] = []
    depths: list[int] = []
    depth = position = 0
    while position < len(text):
        if text.startswith(_BOXED, position):
            position += len(_BOXED)
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
            # a brace of the text before that closes nothing must not close a box
            depth = max(0, depth - 1)
        position += 1
    return found
