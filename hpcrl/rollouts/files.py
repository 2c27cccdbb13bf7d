"""``rollouts/step-000012.jsonl``: what the trainer consumed, a file a step, for people."""

from __future__ import annotations

import os
from pathlib import Path

from hpcrl.fence import Fence
from hpcrl.fs import atomic_write

__all__ = ["RolloutFiles"]


class RolloutFiles:
    """Writes these files behind a fence: an orchestrator that was thought dead replaces none of a newer attempt's."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    @classmethod
    def claim(cls, root: Path, attempt: int) -> RolloutFiles:
        """Become the one writer; see `hpcrl.fence.Fence.claim` (FencedError where a newer attempt was here)."""
        return cls(Fence.claim(root, attempt))

    def write(self, step: int, lines: bytes) -> None:
        """Replace the file of a step.

        Raises
        ------
        FencedError
            A newer attempt writes there.
        OSError
            The filesystem refused; what was there is untouched.
        """
        name = f"step-{step:06d}.jsonl"
        staged = self._fence.path / name
        try:
            atomic_write(staged, lines)
            # out of a directory that a newer attempt has removed
            os.replace(staged, self._fence.root / name)
        except FileNotFoundError:
            self._fence.check()
            raise
