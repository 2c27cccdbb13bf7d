"""Sweeps of small programs in place of roles, by the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from patience import patience, wait_for

from hpcrl.processes import procfs
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus
from hpcrl.sweeps.results import SweepResult, read_sweep_result
from hpcrl.sweeps.sweep_files import SweepDir

ROOT = Path(__file__).resolve().parents[2]
#: probes end by themselves, seconds after they are ready
PROBES = ("--set", "job.payload=probe")
GRID = ("--grid", "trainer.optimizer.learning_rate=1e-4,2e-4")


class SweepLab:
    """A runs root of its own, and commands in it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "runs"
        self.env = {**os.environ, "HPCRL_RUNS_ROOT": str(self.root), "PYTHONPATH": str(ROOT)}

    def hpcrl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcrl", *arguments]
        result = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, check=False, timeout=240.0 * patience()
        )
        if check:
            assert result.returncode == 0, f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def sweep(self, name: str, *options: str) -> SweepDir:
        """Submit a sweep of probes."""
        self.hpcrl("submit", "quickstart", *PROBES, "--name", name, *options)
        return SweepDir.below(self.root, name)

    def python(self, code: str, *arguments: object) -> int:
        """Run code in a process of its own; returns its exit code, negative for a signal."""
        command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=self.env, check=False, timeout=120.0 * patience()).returncode

    def json(self, *arguments: str) -> Any:
        return json.loads(self.hpcrl(*arguments, "--json").stdout)

    def end_all(self) -> None:
        """End the queues and runs of a test."""
        for sweep in self.root.glob(".sweep-*"):
            kill_queue(SweepDir(sweep))
        for process in psutil.process_iter():
            try:
                places = {process.environ().get(name) for name in ("HPCRL_RUN_DIR", "HPCRL_LAUNCH_DIR")}
                if any(place and place.startswith(str(self.root)) for place in places):
                    process.kill()
            except psutil.Error:
                continue


def queue_processes(sweep: SweepDir) -> list[psutil.Process]:
    """The process that starts members, and the one that starts it again, which comes first."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if "hpcrl.sweeps.queue_process" in line and str(sweep.path) in line:
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: "--work" in process.cmdline())


def kill_queue(sweep: SweepDir) -> None:
    """Kill both at once: a machine that goes down does so."""
    found = queue_processes(sweep)
    for process in found:
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(process.is_running() for process in found if not _is_dead(process)), 10.0, "a dead queue")


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def result_of(sweep: SweepDir) -> SweepResult:
    return read_sweep_result(sweep)


def wait_ended(sweep: SweepDir, timeout_s: float = 120.0) -> SweepResult:
    """Wait until all members have ended."""
    return wait_for(lambda: found if (found := read_sweep_result(sweep)).ended else None, timeout_s, "end of the sweep")


def members(sweep: SweepDir) -> list[RunDir]:
    return [sweep.run_of(member) for member in sweep.read().members]


def starts(run: RunDir) -> tuple[int, int]:
    """How many submissions of a run are recorded, and how many attempts there were."""
    return len(RunRecord.read(run).submissions), len(run.attempts())


def most_at_once(runs: list[RunDir]) -> int:
    """The largest number of runs that had a supervisor at the same time."""
    times = []
    for run in runs:
        status = RunStatus.read(run)
        assert status is not None
        assert status.ended_at_s is not None
        times += [(status.started_at_s, 1), (status.ended_at_s, -1)]
    most = count = 0
    for _, change in sorted(times):
        count += change
        most = max(most, count)
    return most


def launched(run: RunDir) -> list[int]:
    """Processes that were started to supervise a run."""
    return [process.pid for process in procfs.with_environ("HPCRL_RUN_ID", RunRecord.read(run).run_id)]
