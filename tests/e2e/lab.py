"""Whole runs of real processes, by the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import patience, wait_for

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentStatus, RunStatus
from hpcrl.trainer.launcher import RANK_NAME

ROOT = Path(__file__).resolve().parents[2]
HPCRL = Path(sys.executable).with_name("hpcrl")
#: short steps, no evaluation on the way
SMALL_RUN = (
    "rollouts.rollouts_per_step=16",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=32",
    "evaluation.every_steps=0",
    "evaluation.prompts=8",
)

#: one task, and processors are free between steps, of which there are two a second: for runs that are watched
SLOW_RUN = (
    "environments=[{name: reverse, kind: words, task: reverse, latency: {median_s: 1.0}}]",
    "trainer.steps=100000",
    "rollouts.rollouts_per_step=8",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=16",
    "evaluation.every_steps=0",
    "evaluation.prompts=8",
)


class Lab:
    """A runs root of its own, and commands in it."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.model = model
        self.keep_runs_in(directory / "runs")

    def keep_runs_in(self, runs_root: Path) -> None:
        """Let commands from now on be about the runs there."""
        self.runs_root = runs_root
        self.env = {**os.environ, "HPCRL_RUNS_ROOT": str(runs_root)}

    def hpcrl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command, limit_s = [HPCRL, *arguments], 240.0 * patience()
        result = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, check=False, timeout=limit_s
        )
        if check:
            assert result.returncode == 0, f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def submit(
        self, name: str, *settings: str, to_end: bool = False, check: bool = True, recipe: str = "quickstart"
    ) -> RunDir:
        """Submit the quickstart, or another recipe for its start model, with this lab's model; ``to_end``: and wait
        until it has completed."""
        sets = [part for s in (f"model.path={self.model}", *settings) for part in ("--set", s)]
        self.hpcrl("submit", recipe, "--name", name, *sets, check=check)
        run = RunDir(self.runs_root / name)
        if to_end:
            self.complete(run)
        return run

    def complete(self, run: RunDir) -> None:
        """Wait until a run has completed and nothing of it is left.

        ``--follow`` would draw its report, too, which costs as much as four other commands.
        """
        assert self.wait_end(run, 240.0).upper() == "COMPLETED"
        wait_gone(run)

    def json(self, *arguments: str) -> Any:
        return json.loads(self.hpcrl(*arguments, "--json").stdout)

    def state(self, run: RunDir) -> str:
        return str(observe(run).state)

    def wait_end(self, run: RunDir, timeout_s: float) -> str:
        """Wait until the run is no longer alive; returns its state."""
        alive = ("SUBMITTED", "PENDING", "STARTING", "RUNNING", "STOPPING", "DRAINING")
        return wait_for(lambda: s if (s := self.state(run)).upper() not in alive else None, timeout_s, "end of run")


class SharedRun:
    """One run for all tests of a module, in any order: after one that has ended, or failed a test, comes another."""

    def __init__(self, lab: Lab, *settings: str) -> None:
        self.lab, self._settings = lab, settings
        self._run: RunDir | None = None
        self._count = 0

    def taken(self, request: pytest.FixtureRequest) -> Iterator[RunDir]:
        """The run with some steps of its newest attempt and a checkpoint, for the fixture of a test; it leaves it so,
        or ends it."""
        failed = request.session.testsfailed
        yield self._take()
        if request.session.testsfailed > failed:
            self.end()

    def end(self) -> None:
        """Nobody takes this run again."""
        for process in processes(self._run) if self._run is not None else ():
            process.send_signal(signal.SIGKILL)
        self._run = None

    def _take(self) -> RunDir:
        if self._run is None or self.lab.state(self._run).upper() != "RUNNING":
            self.end()
            self._count += 1
            self._run = self.lab.submit(f"shared-{self._count}", *self._settings)
        run = self._run
        wait_for(lambda: self.lab.state(run).upper() == "RUNNING", 120, "a run that runs")
        attempt = run.attempts()[-1]
        wait_for(lambda: len([r for r in read_metrics(run) if r.attempt == attempt]) >= 4, 120, "four steps")
        wait_saved(run)
        return run


def wait_step(run: RunDir, step: int, timeout_s: float = 120.0) -> None:
    """Wait until a step was recorded."""
    wait_for(lambda: [r for r in read_metrics(run) if r.step >= step], timeout_s, f"step {step}")


def wait_saved(run: RunDir) -> None:
    """Wait until there is a checkpoint to go on from: a save may take longer than some steps."""
    wait_for(lambda: CheckpointLedger(run.checkpoints_dir).newest_verified().entry, 120, "a checkpoint")


def wait_gone(run: RunDir) -> None:
    """Wait until nothing of a run is left: its state is written before its last process has ended."""
    wait_for(lambda: not processes(run), 10.0, "end of all processes")


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


def rank_number(process: psutil.Process) -> int | None:
    """Which rank of a trainer of several this process is; None for another one, the launcher of ranks among them."""
    before, _ = RANK_NAME.split("{}")
    try:
        name = process.name()
    except psutil.Error:
        return None
    return int(name[len(before) :]) if name.startswith(before) else None


def events(run: RunDir, kind: str, *, since_s: float = 0.0) -> list[Event]:
    """Events of a kind, the oldest first; ``since_s``: those that are later (Unix time)."""
    return [event for event in read_events(run, kind=kind) if event.time_s > since_s]


def steps(run: RunDir) -> dict[int, StepRecord]:
    return {record.step: record for record in read_metrics(run)}


def component(run: RunDir, role: str, replica: int = 0) -> ComponentStatus:
    """A replica, as the supervisor sees it."""
    status = RunStatus.read(run)
    assert status is not None
    return next(c for c in status.components if (c.role, c.replica) == (role, replica))


def last_step(run: RunDir) -> int:
    """The newest that was recorded; 0 where none was."""
    return max(steps(run), default=0)


def after(run: RunDir, fault_s: float, kind: str, **wanted: Any) -> list[float]:
    """Times of events since the fault."""
    found = [e for e in events(run, kind) if e.time_s > fault_s]
    return [e.time_s for e in found if all(e.data.get(name) == value for name, value in wanted.items())]


def newest_counters(run: RunDir) -> dict[str, float]:
    """What the orchestrator has counted until the newest recorded step."""
    recorded = steps(run)
    return recorded[max(recorded)].rollouts


def lost(run: RunDir) -> dict[str, float]:
    """Rollouts that came to nothing, by what they came to nothing for."""
    counters = newest_counters(run)
    return {name: counters[name] for name in ("dropped_engine", "dropped_environment", "dropped_group")}
