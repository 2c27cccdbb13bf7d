"""Lines of log files of any size, in bounded memory: files are read in blocks, and long lines are cut."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK_BYTES = 1 << 18
_LEAST_BLOCK_BYTES = 1 << 13
_ALL_BLOCKS_BYTES = 1 << 24
"""Maximum bytes of blocks of all files that are merged."""
LONGEST_BYTES = 1 << 16
"""Maximum bytes of a line that is shown whole."""


class FoundLine(NamedTuple):
    """Line of a log, and whether it matches the search."""

    text: str
    matches: bool


def file_blocks(path: Path, begin: int, *, end: int | None = None, files: int = 1) -> Iterator[bytes]:
    """Read a file from ``begin`` to ``end`` (its present end), one of ``files`` that are read at once.

    The file is not kept open: a run may have more logs than a process may open files.
    """
    size = max(_LEAST_BLOCK_BYTES, min(_BLOCK_BYTES, _ALL_BLOCKS_BYTES // max(files, 1)))
    at, stop = begin, path.stat().st_size if end is None else end
    while at < stop:
        with path.open("rb") as stream:
            stream.seek(at)
            block = stream.read(min(size, stop - at))
        if not block:
            return
        at += len(block)
        yield block


def split_lines(blocks: Iterable[bytes], grep: re.Pattern[str] | None) -> Iterator[FoundLine]:
    """Split text into lines; the part of a line beyond `LONGEST_BYTES` is searched, and counted instead of shown."""
    rest, left_out, hit = b"", 0, False
    for block in blocks:
        data = rest + block
        # a line break of two bytes may be cut in two
        held, data = (data[-1:], data[:-1]) if data.endswith(b"\r") else (b"", data)
        *whole, rest = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if left_out and whole:
            yield from _shown(whole.pop(0), grep, left_out, hit)
            left_out, hit = 0, False
        if whole and max(map(len, whole)) <= LONGEST_BYTES:
            for text in (b"\n".join(whole) + b"\n").decode(errors="replace").splitlines():
                yield FoundLine(text, grep is None or grep.search(text) is not None)
        else:
            for line in whole:
                yield from _shown(line, grep, 0, False)
        rest += held
        if len(rest) > 2 * LONGEST_BYTES:
            hit = hit or (grep is not None and grep.search(rest.decode(errors="replace")) is not None)
            left_out += len(rest) - LONGEST_BYTES
            rest = rest[:LONGEST_BYTES]
    if rest or left_out:
        yield from _shown(rest.rstrip(b"\r"), grep, left_out, hit)


def _shown(line: bytes, grep: re.Pattern[str] | None, left_out: int, hit: bool) -> Iterator[FoundLine]:
    hit = hit or grep is None
    if len(line) > LONGEST_BYTES:
        hit = hit or (grep is not None and grep.search(line.decode(errors="replace")) is not None)
        left_out += len(line) - LONGEST_BYTES
        line = line[:LONGEST_BYTES]
    text = line.decode(errors="replace")
    if left_out:
        text += f" … {left_out:,} more bytes of this line are not shown"
        yield FoundLine(text, hit or (grep is not None and grep.search(text) is not None))
        return
    for part in text.splitlines() or [""]:
        yield FoundLine(part, hit or (grep is not None and grep.search(part) is not None))


def tail_start(path: Path, lines: int, *, least_bytes: int, most_bytes: int | None = None) -> int:
    """Return where the last lines of a file begin: at least ``lines``, and ``least_bytes`` where there is so much.

    Parameters
    ----------
    most_bytes:
        Maximum bytes behind that place, also where these are fewer lines; None: no limit.
    """
    with path.open("rb") as stream:
        size = at = os.fstat(stream.fileno()).st_size
        first = 0 if most_bytes is None else max(0, size - most_bytes)
        missing = lines + 1  # the last line ends with a line break, too
        while at > first and missing > 0:
            begin = max(first, at - _BLOCK_BYTES)
            stream.seek(begin)
            block = stream.read(at - begin)
            breaks = block.count(b"\n") + block.count(b"\r")
            missing -= breaks
            at = begin
        if at > 0 and size - at < least_bytes:
            at = max(first, size - least_bytes)
        if at == 0:
            return 0
        # continue at the beginning of a line
        stream.seek(at)
        block = stream.read(_BLOCK_BYTES)
        found = re.search(rb"[\r\n]", block)
        return at if found is None else at + found.end()
