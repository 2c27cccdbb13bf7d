"""Whole runs of real processes, by the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hpcrl.runs.events import Event, read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
HPCRL = Path(sys.executable).with_name("hpcrl")
#: a model that knows something, made in seconds
SMALL_MODEL = ("model.warmup.steps=60", "model.warmup.num_experts=4")
#: short steps, no evaluation on the way
SMALL_RUN = (
    "rollouts.rollouts_per_step=16",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=32",
    "evaluation.every_steps=0",
    "evaluation.prompts=8",
)


class Lab:
    """A runs root of its own, and commands in it."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.runs_root = directory / "runs"
        self.model = model
        self.env = {**os.environ, "HPCRL_RUNS_ROOT": str(self.runs_root)}

    def hpcrl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [HPCRL, *arguments], cwd=ROOT, env=self.env, capture_output=True, text=True, check=False, timeout=240
        )
        if check:
            assert result.returncode == 0, f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def submit(self, name: str, *settings: str, follow: bool = False, check: bool = True) -> RunDir:
        """Submit the quickstart with this lab's model."""
        sets = [part for s in (f"model.path={self.model}", *settings) for part in ("--set", s)]
        self.hpcrl("submit", "quickstart", "--name", name, *sets, *(["--follow"] if follow else []), check=check)
        return RunDir(self.runs_root / name)

    def json(self, *arguments: str) -> Any:
        return json.loads(self.hpcrl(*arguments, "--json").stdout)

    def state(self, run: RunDir) -> str:
        return str(self.json("status", run.name)["state"])

    def wait_end(self, run: RunDir, timeout_s: float) -> str:
        """Wait until the run is no longer alive; returns its state."""
        alive = ("SUBMITTED", "PENDING", "STARTING", "RUNNING", "STOPPING", "DRAINING")
        return wait_for(lambda: s if (s := self.state(run)).upper() not in alive else None, timeout_s, "end of run")


def wait_for(probe: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Poll until ``probe`` gives something."""
    deadline = time.monotonic() + timeout_s
    while not (value := probe()):
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.1)
    return value


def wait_step(run: RunDir, step: int, timeout_s: float = 120.0) -> None:
    """Wait until a step was recorded."""
    wait_for(lambda: [r for r in read_metrics(run) if r.step >= step], timeout_s, f"step {step}")


def processes(run: RunDir) -> list[psutil.Process]:
    """Every process that carries the run's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HPCRL_RUN_DIR") == str(run.path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def events(run: RunDir, kind: str) -> list[Event]:
    return [event for event in read_events(run) if event.kind == kind]


def steps(run: RunDir) -> dict[int, StepRecord]:
    return {record.step: record for record in read_metrics(run)}
