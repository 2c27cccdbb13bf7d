"""Gres of a node as Slurm writes it: ``gpu:h200:8(S:0-1),nvme:1``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BRACKETS = re.compile(r"\([^()]*\)")
"""Sockets or device indices, which contain commas: ``(S:0,2-3)``, ``(IDX:0-7)``."""
_COUNT = re.compile(r"([0-9]{1,9})([KMGTP]?)", re.IGNORECASE)
_UNITS = {unit: 1024**power for power, unit in enumerate(("", "K", "M", "G", "T", "P"))}
_FLAGS = frozenset({"no_consume"})


def gpus_by_type(text: str) -> dict[str, int]:
    """Return the GPUs of a node by type; ``""`` where they have none. Shards and other Gres are not GPUs.

    A type may begin with a digit (``1g.10gb``, a slice), and a count may be missing, which is one.
    """
    found: dict[str, int] = {}
    for words in _entries(text):
        if words[0] != "gpu":
            continue
        rest, count = [word for word in words[1:] if word not in _FLAGS], 1
        if rest and (match := _COUNT.fullmatch(rest[-1])):
            count, rest = int(match[1]) * _UNITS[match[2].upper()], rest[:-1]
        kind = rest[0] if rest else ""
        if count:
            found[kind] = found.get(kind, 0) + count
    return found


def _entries(text: str) -> Iterator[list[str]]:
    for entry in _BRACKETS.sub("", text).split(","):
        yield entry.strip().removeprefix("gres/").removeprefix("gres:").split(":")
