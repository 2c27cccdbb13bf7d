"""A `WeightSync` whose memory goes, or whose process stands still or dies, when a version is announced.

Runs import it by ``handoff.sync``; roles find it by ``PYTHONPATH``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from hpcrl.trainer.publish.custom_sync import SyncParts
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.trainer.publish.sync import FileSync
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.lifetime.leases import ReaderWatch

STOPPED_S = 20


class FaultySync:
    """The usual way; of version ``gone`` the served memory is taken away, at version ``stopped`` the process stops.

    It dies once, when all engines have loaded version ``killed``.
    """

    def __init__(self, parts: SyncParts, *, gone: int = -1, stopped: int = -1, killed: int = -1) -> None:
        assert isinstance(parts.files, FileSync)
        self._files, self._gone, self._stopped, self._killed = parts.files, gone, stopped, killed
        self._weights, self._mark = parts.run_dir / "weights", parts.run_dir / "killed"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def publish(self, policy: TrainerPolicy, version: int, announce: Callable[[int], None]) -> None:
        def faulty(number: int) -> None:
            publisher = self._files._publisher
            assert isinstance(publisher, Publisher)
            assert publisher._fabric is not None
            if number == self._gone:
                ring, publisher._fabric._ring = publisher._fabric._ring, None
                assert ring is not None
                ring.close()
            if number == self._stopped:
                # engines find the version in the store meanwhile
                words = f"kill -STOP {os.getpid()}; sleep {STOPPED_S}; kill -CONT {os.getpid()}"
                subprocess.run(["sh", "-c", words], check=True)
            announce(number)
            if number == self._killed and not self._mark.exists():
                self._mark.touch()
                watch = ReaderWatch(self._weights, expiry_s=60.0)
                while watch.acknowledged_version() != number:
                    time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)

        self._files.publish(policy, version, faulty)
