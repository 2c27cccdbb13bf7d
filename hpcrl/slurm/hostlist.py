"""Slurm's node lists: ``h200-[001-003,007]`` and the names it stands for. Pure; no ``scontrol`` needed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_NOTHING = frozenset({"", "(null)", "None", "None assigned", "N/A"})
_MOST = 1 << 16
"""Maximum number of names of a list: Slurm refuses a larger range, and does not have more nodes."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_BRACKET = re.compile(r"\[([^\]]*)\]")


def expand_hostlist(text: str) -> list[str]:
    """Return the names of the nodes of a list, in its order; empty where Slurm reports none.

    Several brackets in a name multiply: ``r[1-2]n[1-2]`` is four nodes.

    Raises
    ------
    ValueError
        The list is malformed.
    """
    if text.strip() in _NOTHING:
        return []
    names = (name for part in _split(text.strip()) for name in _expand(part) if name)
    found = list(itertools.islice(names, _MOST + 1))
    if len(found) > _MOST:
        raise ValueError(f"malformed node list {text[:200]!r}: it names more than {_MOST} nodes")
    return found


def _split(text: str) -> Iterator[str]:
    """Yield the parts between commas that are outside of brackets."""
    depth, start = 0, 0
    for position, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if depth not in (0, 1):
            break
        if sign == "," and not depth:
            yield text[start:position]
            start = position + 1
    if depth:
        raise ValueError(f"malformed node list {text!r}")
    yield text[start:]


def _expand(part: str) -> Iterator[str]:
    match = _BRACKET.search(part)
    if match is None:
        yield part
        return
    for number in _numbers(match.group(1)):
        for rest in _expand(part[match.end() :]):
            yield f"{part[: match.start()]}{number}{rest}"


def _numbers(ranges: str) -> Iterator[str]:
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        if not _NUMBER.fullmatch(first) or (dash and not _NUMBER.fullmatch(last)):
            raise ValueError(f"malformed range {item!r} in a node list")
        numbers = range(int(first), int(last if dash else first) + 1)
        if not 0 < len(numbers) <= _MOST:
            raise ValueError(f"malformed range {item!r} in a node list: it names {len(numbers)} nodes")
        for number in numbers:
            yield f"{number:0{len(first)}d}"
