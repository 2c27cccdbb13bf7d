"""What the trainer consumed, for people: ``rollouts/step-000012.jsonl``, and a file for each hundred steps before
(`hpcrl.runs.consumed` has the form)."""

from __future__ import annotations

import logging
from pathlib import Path

from hpcrl import lost_answers
from hpcrl.errors import FencedError
from hpcrl.fence import Fence
from hpcrl.fs import atomic_write, fsync_dir
from hpcrl.reporting import ReportedFile
from hpcrl.runs.consumed import STEPS_A_FILE, ConsumedRollouts, first_step, shared_name, step_name

__all__ = ["RolloutFiles"]

_log = logging.getLogger(__name__)
_SHARED_BYTES = 64 << 20
"""Steps that are larger together keep files of their own: sharing would save few files and copy much."""


class RolloutFiles:
    """Writes these files behind a fence: an orchestrator that was thought dead replaces none of a newer attempt's."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._first = 1

    @classmethod
    def claim(cls, root: Path, attempt: int) -> RolloutFiles:
        """Become the one writer; see `hpcrl.fence.Fence.claim` (FencedError where a newer attempt was here)."""
        return cls(Fence.claim(root, attempt))

    def write(self, step: int, lines: bytes, *, wait_s: float) -> None:
        """Replace the file of a step. It is a report (`hpcrl.reporting`): it is waited for so many seconds at most,
        and what a newer attempt refuses is said in the log."""
        file = _FencedFile(self._fence, step_name(step))
        file.put(lines)
        file.flush(wait_s)
        first = first_step(step)
        if first != self._first:  # a new hundred, or the first step of a resumed run
            self._first = first
            if first > STEPS_A_FILE:
                _SharedFile(self._fence, first - STEPS_A_FILE).put(b"")


class _FencedFile(ReportedFile):
    """A report that appears by a rename out of the writer's own directory, which a newer attempt removes."""

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
                _log.warning("%s is left as it is: %s", self.path, error)
            else:
                raise
        data.clear()

    def _replace(self, content: bytes) -> None:
        staged = self._fence.path / self.path.name
        atomic_write(staged, content)
        lost_answers.replace(staged, self.path)


class _SharedFile(_FencedFile):
    """The file of a hundred steps, made out of those of its steps, by the thread that writes reports."""

    def __init__(self, fence: Fence, first: int) -> None:
        super().__init__(fence, shared_name(first))
        self._first = first

    def _replace(self, content: bytes) -> None:
        root, steps = self._fence.root, range(self._first, self._first + STEPS_A_FILE)
        single = [step for step in steps if (root / step_name(step)).is_file()]
        files = [self.path.name, *map(step_name, single)]
        size = sum((root / name).stat().st_size for name in files if (root / name).is_file())
        if len(single) > 1 and size <= _SHARED_BYTES:
            self._share(steps, single)

    def _share(self, steps: range, single: list[int]) -> None:
        root, staged = self._fence.root, self._fence.path / self.path.name
        consumed = ConsumedRollouts(root)
        lines = [_numbered(step, line) for step in steps for line in consumed.of(step)]
        atomic_write(staged, b"".join(lines))
        lost_answers.replace(staged, self.path)
        fsync_dir(root)  # before what it was made of goes
        for step in single:
            # by way of our own directory: where a newer attempt has removed that, this is its file
            gone = self._fence.path / step_name(step)
            lost_answers.rename(root / step_name(step), gone)
            gone.unlink(missing_ok=True)


def _numbered(step: int, line: bytes) -> bytes:
    """A line that says its step first; one of a shared file does already."""
    head = b'{"step":%d,' % step
    return (line if line.startswith(head) else head + line[1:]) + b"\n"
