"""``rollouts/step-000012.jsonl``: what the trainer consumed, a file a step, for people."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hpcrl.errors import FencedError
from hpcrl.fence import Fence
from hpcrl.fs import atomic_write
from hpcrl.reporting import ReportedFile

__all__ = ["RolloutFiles"]

_log = logging.getLogger(__name__)


class RolloutFiles:
    """Writes these files behind a fence: an orchestrator that was thought dead replaces none of a newer attempt's."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    @classmethod
    def claim(cls, root: Path, attempt: int) -> RolloutFiles:
        """Become the one writer; see `hpcrl.fence.Fence.claim` (FencedError where a newer attempt was here)."""
        return cls(Fence.claim(root, attempt))

    def write(self, step: int, lines: bytes, *, wait_s: float) -> None:
        """Replace the file of a step. It is a report (`hpcrl.reporting`): it is waited for so many seconds at most,
        and what a newer attempt refuses is said in the log."""
        file = _FencedFile(self._fence, f"step-{step:06d}.jsonl")
        file.put(lines)
        file.flush(wait_s)


class _FencedFile(ReportedFile):
    """A report that appears by a rename out of the writer's own directory, which a newer attempt removes."""

    def __init__(self, fence: Fence, name: str) -> None:
        super().__init__(fence.root / name)
        self._fence = fence

    def _write(self, data: list[bytes]) -> None:
        staged = self._fence.path / self.path.name
        try:
            atomic_write(staged, data[0])
            os.replace(staged, self.path)
        except FileNotFoundError:
            try:
                self._fence.check()
            except FencedError as error:
                _log.warning("%s is left as it is: %s", self.path, error)
            else:
                raise
        data.clear()
