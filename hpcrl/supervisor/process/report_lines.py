"""Lines of our own in a stream that others write to as well. Standard library only, as the guard is.

The standard output of a step is not ours alone: a TaskProlog, a wrapper of ``srun``, a ``sitecustomize`` or a shell's
start file may print there, with or without an end of line, and ``srun`` may put a label before each line. So each line
of ours carries a mark, and what has none is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["DamagedLineError", "LineSplitter", "encode_line", "find_lines"]

_MARK = b"@hpcrl-line "
_LONGEST = 1 << 20
"""So many bytes without an end of line are nobody's report; only the end of them is kept."""
_KEPT = 1 << 16
_TEXT = 200
"""What is left of a text or a list of texts where a line has to be short, in characters."""


class DamagedLineError(ValueError):
    """A line carries our mark, and what follows is not what was written."""


def encode_line(said: Mapping[str, Any], *, limit: int | None = None) -> bytes:
    """One line with our mark, to be written by one call.

    Parameters
    ----------
    limit:
        Longest line in bytes; longer ones lose the ends of their texts and lists. Slurm hands lines on in pieces of
        1024 bytes, between which those of other tasks may come.
    """
    line = _encode(said)
    if limit is not None and len(line) > limit:
        shorter = {key: value[:_TEXT] if isinstance(value, str) else value for key, value in said.items()}
        line = _encode(shorter)
        lists = [key for key, value in said.items() if isinstance(value, list)]
        while len(line) > limit and any(shorter[key] for key in lists):
            longest = max(lists, key=lambda key: len(json.dumps(shorter[key])))
            shorter[longest] = shorter[longest][:-1]
            line = _encode(shorter)
    return line


def _encode(said: Mapping[str, Any]) -> bytes:
    return _MARK + json.dumps(said).encode() + b"\n"


def find_lines(line: bytes) -> list[dict[str, Any]]:
    """What of a line is ours; nothing where it is somebody else's, whatever it looks like.

    Raises
    ------
    DamagedLineError
        It has our mark, and no object follows.
    """
    found = []
    for piece in line.split(_MARK)[1:]:
        try:
            said, _ = json.JSONDecoder().raw_decode(piece.decode())
        except (ValueError, RecursionError) as error:
            raise DamagedLineError(f"{error}: {piece[:_TEXT]!r}") from error
        if not isinstance(said, dict):
            raise DamagedLineError(f"it is no object: {piece[:_TEXT]!r}")
        found.append(said)
    return found


class LineSplitter:
    """Makes lines of pieces of a stream, whatever is in it."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """Take the next piece; returns the lines that it has completed. The end of the stream is an empty piece."""
        if not data:
            lines, self._rest = [self._rest] if self._rest else [], b""
            return lines
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = self._rest[-_KEPT:]
        return lines
