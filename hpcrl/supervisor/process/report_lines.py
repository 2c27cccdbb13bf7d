"""Lines of reports in a stream that other programs write to as well. Standard library only, as the guard is.

Other programs write to the standard output of a step as well: a TaskProlog, a wrapper of ``srun``, a ``sitecustomize``
or a shell's start file may print there, with or without an end of line, and ``srun`` may put a label before each line.
So each line of a guard carries a mark, and text without one is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MARK = b"@hpcrl-line "
_LONGEST = 1 << 20
"""Maximum bytes without an end of line; more cannot be a report, and only the last bytes are kept."""
_KEPT = 1 << 16
_TEXT = 200
"""Length in characters to which texts and lists of texts are cut if a line has to be short."""


class DamagedLineError(ValueError):
    """A line carries the mark of reports, but the text after it is damaged."""


def encode_line(said: Mapping[str, Any], *, limit: int | None = None) -> bytes:
    """Return one line with the mark of reports, to be written by one call.

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
    """Return the guard reports in a line; empty if the line has none, whatever else it contains.

    Raises
    ------
    DamagedLineError
        The line has the mark of a report, but no JSON object follows.
    """
    found = []
    for piece in line.split(_MARK)[1:]:
        try:
            said, _ = json.JSONDecoder().raw_decode(piece.decode())
        except (ValueError, RecursionError) as error:
            raise DamagedLineError(f"{error}: {piece[:_TEXT]!r}") from error
        if not isinstance(said, dict):
            raise DamagedLineError(f"it is not an object: {piece[:_TEXT]!r}")
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
