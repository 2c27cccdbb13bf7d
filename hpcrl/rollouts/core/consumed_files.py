"""Consumed rollouts for people: a file for each of the newest steps, and one for each hundred steps before.

The form, ``rollouts/step-000012.jsonl``, is defined in `hpcrl.runs.consumed`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hpcrl.errors import FencedError
from hpcrl.reporting.reports import ReportedFile
from hpcrl.runs.consumed import (
    STEPS_A_FILE,
    ConsumedRollouts,
    first_step,
    pack_lines,
    plain_shared_name,
    shared_name,
    step_name,
)
from hpcrl.storage import lost_replies
from hpcrl.storage.fence import Fence
from hpcrl.storage.files import atomic_write, fsync_dir

_log = logging.getLogger(__name__)
_SHARED_BYTES = 64 << 20
"""Maximum total size of steps that share a file: sharing larger ones would save few files and copy much."""


class RolloutFiles:
    """Writes these files behind a fence: an orchestrator that was thought dead replaces none of a newer attempt's."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._first = 1

    @classmethod
    def claim(cls, root: Path, attempt: int) -> RolloutFiles:
        """Become the single writer (`hpcrl.storage.fence.Fence.claim`); FencedError after a newer attempt's claim."""
        return cls(Fence.claim(root, attempt))

    def write(self, step: int, lines: bytes, *, wait_s: float) -> None:
        """Replace the file of a step, as a report (`hpcrl.reporting.reports`).

        The call waits at most ``wait_s`` seconds. A write that the fence of a newer attempt refuses is logged.
        """
        file = _FencedFile(self._fence, step_name(step))
        file.put(lines)
        file.flush(wait_s)
        first = first_step(step)
        if first != self._first:  # a new hundred, or the first step of a resumed run
            self._first = first
            if first > STEPS_A_FILE:
                _SharedFile(self._fence, first - STEPS_A_FILE).put(b"")


class _FencedFile(ReportedFile):
    """Report that is renamed from the writer's own directory, which a newer attempt removes."""

    def __init__(self, fence: Fence, name: str) -> None:
        super().__init__(fence.root / name)
        self._fence = fence

    def _write(self, data: list[bytes]) -> None:
        try:
            self._replace(data[0])
        except FileNotFoundError:
            try:
                self._fence.check()
            except FencedError as error:
                _log.warning("%s is not replaced: %s", self.path, error)
            else:
                raise
        data.clear()

    def _replace(self, content: bytes) -> None:
        staged = self._fence.path / self.path.name
        atomic_write(staged, content)
        lost_replies.replace(staged, self.path)


class _SharedFile(_FencedFile):
    """File of a hundred steps, made out of the files of its steps by the thread that writes reports."""

    def __init__(self, fence: Fence, first: int) -> None:
        super().__init__(fence, shared_name(first))
        self._first = first

    def _replace(self, content: bytes) -> None:
        root, steps = self._fence.root, range(self._first, self._first + STEPS_A_FILE)
        single = [step for step in steps if (root / step_name(step)).is_file()]
        files = [self.path.name, plain_shared_name(self._first), *map(step_name, single)]
        size = sum((root / name).stat().st_size for name in files if (root / name).is_file())
        if len(single) > 1 and size <= _SHARED_BYTES:
            self._share(steps, single)

    def _share(self, steps: range, single: list[int]) -> None:
        root, staged = self._fence.root, self._fence.path / self.path.name
        consumed = ConsumedRollouts(root)
        lines = [_numbered(step, line) for step in steps for line in consumed.of(step)]
        atomic_write(staged, pack_lines(b"".join(lines)))
        lost_replies.replace(staged, self.path)
        fsync_dir(root)  # durable before the files that it replaces are removed
        plain = plain_shared_name(self._first)
        for name in [*map(step_name, single), *([plain] if (root / plain).is_file() else [])]:
            # renamed into the writer's own directory before the removal: where a newer attempt has removed that
            # directory, this fails, because the file belongs to that attempt
            gone = self._fence.path / name
            lost_replies.rename(root / name, gone)
            gone.unlink(missing_ok=True)


def _numbered(step: int, line: bytes) -> bytes:
    """Return a line that begins with its step; a line of a shared file has it already."""
    head = b'{"step":%d,' % step
    return (line if line.startswith(head) else head + line[1:]) + b"\n"
