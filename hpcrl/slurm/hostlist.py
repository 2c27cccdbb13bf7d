"""Slurm's short form of node names: ``h200-[001-003,007],login1``. In Python, as not every node has scontrol."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["expand_hostlist"]

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expand a host list, in its order.

    Raises
    ------
    ValueError
        It is not in Slurm's form.
    """
    hosts: list[str] = []
    for part in _split(text.strip()):
        hosts.extend(_expand(part))
    return tuple(hosts)


def _split(text: str) -> Iterator[str]:
    """Split at commas outside of brackets."""
    depth, begin = 0, 0
    for i, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            yield text[begin:i]
            begin = i + 1
    if depth or not text[begin:]:
        raise ValueError(f"not a host list: {text!r}")
    yield text[begin:]


def _expand(part: str) -> Iterator[str]:
    match = _BRACKETS.search(part)
    if match is None:
        if not part or "[" in part or "]" in part:
            raise ValueError(f"not a host list: {part!r}")
        yield part
        return
    for piece in match[1].split(","):
        numbers = _RANGE.fullmatch(piece)
        if numbers is None:
            raise ValueError(f"not a range in a host list: {piece!r}")
        first, last = numbers[1], numbers[2] or numbers[1]
        for number in range(int(first), int(last) + 1):
            # as many digits as the first number was written with
            yield from _expand(f"{part[: match.start()]}{number:0{len(first)}d}{part[match.end() :]}")
