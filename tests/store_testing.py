"""A real Mooncake master as the role ``store`` of a run directory made by hand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from patience import wait_for

from hpcrl.runs.events import read_events
from hpcrl.runs.rundir import RunDir
from hpcrl.store.endpoints import StoreEndpoints

MISSING = importlib.util.find_spec("mooncake") is None
REASON = "mooncake is not installed: pip install mooncake-transfer-engine-non-cuda"
RUN_ID = "0123456789abcdef"


class MasterRole:
    """One start of the role in attempt 1 of a run."""

    def __init__(
        self, run: RunDir, port: int, *, client_ttl_s: float = 3.0, lease_ttl_s: float = 2.0, etcd: str = ""
    ) -> None:
        self.run, self.log = run, run.path / "store.log"
        command = [sys.executable, "-m", "hpcrl.store.master", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--client-ttl-s", str(client_ttl_s)]
        command += ["--lease-ttl-s", str(lease_ttl_s), "--eviction-high-watermark", "0.9", "--eviction-ratio", "0.1"]
        command += ["--etcd", etcd] if etcd else []
        env = {**os.environ, "HPCRL_RUN_DIR": str(run.path), "HPCRL_ATTEMPT": "1", "HPCRL_ROLE": "store"}
        self.ready = run.path / "attempts/0001/ready/store-0.json"
        self.ready.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=env | {"HPCRL_REPLICA": "0"}, stdout=log, stderr=log)

    def wait_ready(self) -> StoreEndpoints:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            return self.ready.exists()

        wait_for(ready, 30.0, "ready master")
        return StoreEndpoints.read(self.run, 1)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(120)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for event in read_events(self.run, kind=kind)]


def make_run_dir(path: Path) -> RunDir:
    run = RunDir(path)
    run.path.mkdir()
    run.start_attempt()
    return run
