"""Worker processes of the role ``env``, and the orchestrator's side of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from free_ports import free_blocks
from harness import make_run
from patience import patience

from hpcrl.processes.interpreter import module_command
from hpcrl.rollouts.environments import Environment, build_environments
from hpcrl.rollouts.environments.workers.link import LinkEvents
from hpcrl.rollouts.environments.workers.remote_environment import EnvironmentWorkers
from hpcrl.runs.role import Endpoints, RoleContext
from hpcrl.runs.rundir import RunDir


class Told:
    """What was told of workers, in order."""

    def __init__(self) -> None:
        self.lost: list[tuple[int, str, int]] = []
        self.back: list[int] = []
        self.silent: list[tuple[int, str]] = []
        self.processes: list[tuple[str, str]] = []
        self.events = LinkEvents(
            on_lost=lambda *told: self.lost.append(told),
            on_back=lambda replica, away_s: self.back.append(replica),
            on_silent=lambda *told: self.silent.append(told),
            on_process_lost=lambda *told: self.processes.append(told),
        )


class WorkerLab:
    """A run with workers, which are started and killed here as the supervisor would."""

    def __init__(self, path: Path, count: int, environments: Sequence[dict[str, Any]]) -> None:
        self.run: RunDir = make_run(
            path, environments=list(environments), environment_workers={"count": count, "placement": "trainer_node"}
        )
        self.recipe, self.attempt = self.run.recipe(), self.run.attempts()[-1]
        self.urls = [f"http://127.0.0.1:{port}" for port in free_blocks([1] * count)]
        Endpoints(urls={"env": self.urls}).write(self.run, self.attempt)
        self.told = Told()
        self.workers = EnvironmentWorkers(events=self.told.events, wait_timeout_s=60.0)
        self.environments: tuple[Environment, ...] = build_environments(self.recipe, workers=self.workers)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.log = path / "workers.log"
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *replicas: int) -> None:
        """Start worker processes."""
        for replica in replicas:
            variables = {
                "HPCRL_RUN_DIR": str(self.run.path),
                "HPCRL_ATTEMPT": str(self.attempt),
                "HPCRL_ROLE": "env",
                "HPCRL_REPLICA": str(replica),
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            command = module_command(sys.executable, "hpcrl.rollouts.environments.workers")
            with self.log.open("ab") as log:
                self.processes[replica] = subprocess.Popen(
                    command, env={**os.environ, **variables}, stdout=log, stderr=log
                )

    async def __aenter__(self) -> WorkerLab:
        self.start(*range(len(self.urls)))
        context = RoleContext(self.run, attempt=self.attempt, role="orchestrator", replica=0, rank=0)
        self.http = aiohttp.ClientSession(headers=context.credentials.headers)
        members = Endpoints.read(self.run, self.attempt).fixed("env")
        self._tasks = self.workers.start(members, self.http, spawn=asyncio.create_task)
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self.workers.aclose()
        await self.http.close()
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            await asyncio.to_thread(process.wait, 20.0 * patience())

    async def until_up(self, *replicas: int) -> None:
        """Wait until workers are there."""
        await self.until(lambda: all(self.workers.links[replica].up for replica in replicas))

    async def until(self, condition: Any, timeout_s: float = 60.0) -> None:
        """Wait for ``condition()``."""
        began_s = time.monotonic()
        while not condition():
            dead = {number: each.returncode for number, each in self.processes.items() if each.returncode is not None}
            assert time.monotonic() - began_s < timeout_s * patience(), f"{dead} {self.log.read_text()[-4000:]}"
            await asyncio.sleep(0.02)
