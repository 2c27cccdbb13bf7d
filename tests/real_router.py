"""A real router, started by the command that a plan has."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Collection
from pathlib import Path

import pytest
from free_ports import free_blocks
from vllm_environment import VLLM_PYTHON

from hpcrl.config.load import load_recipe
from hpcrl.jobplan.commands.router import ROUTER_PORTS, router_command
from hpcrl.network.credentials import Credentials
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor.launch.commands import fill_placeholders

HOST = "127.0.0.1"


class NeverRestarted:
    """The supervisor of a router whose engines stay what they are (`hpcrl.rollouts.supervised.Supervised`)."""

    def restart_router(self, why: str) -> None:
        pytest.fail(why)

    def router_ready_s(self) -> float:
        return 0.0

    def leave_out(self, engines: Collection[str]) -> None:
        pytest.fail(f"{engines} are left out")


class Router:
    """The program; `start` starts it, and starts it again on its port."""

    def __init__(self, log: Path, kind: str = "vllm-router", run: RunDir | None = None) -> None:
        """Prepare.

        Parameters
        ----------
        run:
            Whose newest attempt it belongs to; None: it answers everybody.
        """
        self.kind = kind
        self._env, self._headers = dict(os.environ), {}
        if run is not None:
            who = {"RUN_DIR": run.path, "ATTEMPT": run.attempts()[-1], "ROLE": "router", "REPLICA": 0}
            self._env |= {f"HPCRL_{name}": str(value) for name, value in who.items()}
            self._headers = Credentials.of_run(run.path, run.attempts()[-1]).headers
        (self.port,) = free_blocks([ROUTER_PORTS])
        self.url, self._log = f"http://{HOST}:{self.port}", log
        settings = [f"engine.router.kind={kind}", "engine.router.health_interval_s=1"]
        recipe = load_recipe("quickstart_vllm", settings).value
        values = {"python": str(VLLM_PYTHON), "host": HOST, "port": str(self.port)}
        self._command = fill_placeholders(router_command(recipe), values)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        """Start it; ``flags`` are added to its command from now on."""
        self._command = [*self._command, *flags]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        deadline = time.monotonic() + 60.0
        while True:
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"{self.url}/liveness", headers=self._headers)
                return urllib.request.urlopen(request, timeout=1.0).close()
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, "the router did not start"
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
