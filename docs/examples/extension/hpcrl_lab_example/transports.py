"""A weight transport: versions go the usual way, and some of them are copied to another filesystem."""

import shutil
from collections.abc import Callable
from pathlib import Path

from hpcrl.trainer.publish.custom_sync import SyncParts
from hpcrl.trainer.step.phases import PhaseClock
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights import HandoffStore


class MirrorSync:
    """Brings versions to engines as usual; ``mirror`` has a copy of each version that is a multiple of ``every``."""

    def __init__(self, parts: SyncParts, *, mirror: str, every: int = 1) -> None:
        self._files, self._emit = parts.files, parts.emit
        self._store = HandoffStore(parts.run_dir / "weights")
        self._mirror, self._every = Path(mirror), every

    def restored(self, policy: TrainerPolicy, step: int) -> None:
        """Make what was restored the newest version."""
        self._files.restored(policy, step)

    def begin_step(self, clock: PhaseClock) -> None:
        """Begin a step."""
        self._files.begin_step(clock)

    def publish(self, policy: TrainerPolicy, version: int, announce: Callable[[int], None]) -> None:
        """Publish a version; rank 0 copies it when it is whole."""

        def announced(version: int) -> None:
            announce(version)
            if version % self._every == 0:
                self._copy(version)

        self._files.publish(policy, version, announced)

    def _copy(self, version: int) -> None:
        source, target = self._store.path_of(version), self._mirror / f"v{version:06d}"
        shutil.copytree(source, target, dirs_exist_ok=True)
        self._emit("mirror.copied", version=version, to=str(target))

    def end_step(self, clock: PhaseClock) -> None:
        """End a step."""
        self._files.end_step(clock)

    def wait(self) -> None:
        """Wait for what was published."""
        self._files.wait()

    def close(self) -> None:
        """Let go of everything."""
        self._files.close()
