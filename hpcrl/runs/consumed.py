"""Consumed rollouts in ``rollouts/``: a file a step for the newest hundred, a file for each hundred before.

``step-000112.jsonl`` has the rollouts of one step. When a hundred is full, its steps share
``steps-000101-000200.jsonl.gz``, in which each line begins with its step: days of a run are hundreds of files and not
ten thousands. Runs of earlier versions have it without compression. Where a step has a file of its own, that counts: it
was written later, by an attempt that did the step again.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

STEPS_A_FILE = 100
_STEP = re.compile(r"step-(\d{6,})\.jsonl")
_SHARED = re.compile(r"steps-(\d{6,})-\d{6,}\.jsonl(?:\.gz)?")
_NUMBERED = re.compile(rb'\{"step":(\d+),')


def step_name(step: int) -> str:
    """Return the name of the file of one step."""
    return f"step-{step:06d}.jsonl"


def first_step(step: int) -> int:
    """Return the first step of the hundred that contains ``step``."""
    return (step - 1) // STEPS_A_FILE * STEPS_A_FILE + 1


def shared_name(first: int) -> str:
    """Return the name of the file of a hundred steps, by its first step."""
    return f"{plain_shared_name(first)}.gz"


def plain_shared_name(first: int) -> str:
    """Return the name that this file has in runs of earlier versions, which did not compress it."""
    return f"steps-{first:06d}-{first + STEPS_A_FILE - 1:06d}.jsonl"


def pack_lines(lines: bytes) -> bytes:
    """Return the content of a shared file."""
    return gzip.compress(lines, 6, mtime=0)


class ConsumedRollouts:
    """Consumed rollouts of a run by step, as JSON lines. A step without a file has none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._first, self._shared = 0, dict[int, list[bytes]]()

    def of(self, step: int) -> list[bytes]:
        """Return the lines of one step. The last one may be torn, where its writer was killed."""
        try:
            return (self.directory / step_name(step)).read_bytes().splitlines()
        except FileNotFoundError:  # it was moved after the shared file was complete
            return self.shared(first_step(step)).get(step, [])

    def shared(self, first: int) -> dict[int, list[bytes]]:
        """Return the lines of the shared file of a hundred steps, by step; the last file read is cached."""
        if first != self._first or not self._shared:
            self._first, self._shared = first, {}
            for line in self._shared_lines(first).splitlines():
                if match := _NUMBERED.match(line):
                    self._shared.setdefault(int(match[1]), []).append(line)
        return self._shared

    def _shared_lines(self, first: int) -> bytes:
        """Return the lines of a shared file; none where there is no such file.

        Raises
        ------
        OSError
            It cannot be read, or is damaged.
        """
        path = self.directory / shared_name(first)
        try:
            return gzip.decompress(path.read_bytes())
        except FileNotFoundError:
            pass
        except (EOFError, zlib.error) as error:
            raise OSError(f"{path} is damaged: {error}") from error
        try:
            return (self.directory / plain_shared_name(first)).read_bytes()
        except FileNotFoundError:
            return b""

    def steps(self) -> list[int]:
        """Return the steps that have rollouts, ascending."""
        return self.newest_steps(None)

    def newest_steps(self, count: int | None) -> list[int]:
        """Return the newest ``count`` steps (None: all) that have rollouts, ascending; older files are not read."""
        if not self.directory.is_dir():
            return []
        singles: dict[int, set[int]] = {}
        shared = set()
        for name in os.listdir(self.directory):
            if match := _STEP.fullmatch(name):
                singles.setdefault(first_step(int(match[1])), set()).add(int(match[1]))
            elif match := _SHARED.fullmatch(name):
                shared.add(int(match[1]))
        found: list[int] = []
        for first in sorted({*singles, *shared}, reverse=True):
            steps = singles.get(first, set()) | (self.shared(first).keys() if first in shared else set())
            found += sorted(steps, reverse=True)
            if count is not None and len(found) >= count:
                break
        return sorted(found[:count])

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines of all steps, in their order."""
        for step in self.steps():
            yield from self.of(step)
