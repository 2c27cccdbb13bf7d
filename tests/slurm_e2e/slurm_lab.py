"""Whole runs on a virtual cluster, by the command line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from observed import status_of
from patience import patience, wait_for

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.processes import procfs
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.client import SlurmClient

ROOT = Path(__file__).resolve().parents[2]
_ASK_S = 0.3
"""Between two commands of Slurm, or looks at all processes: they take a processor that what is tested wants."""
HPCRL = Path(sys.executable).with_name("hpcrl")
#: small steps of which there are two a second, and processors are free meanwhile; no evaluation on the way, two trainer
#: nodes and two engine nodes
SMALL_RUN = (
    "environments=[{name: reverse, kind: words, task: reverse, latency: {median_s: 1.0}}]",
    "rollouts.rollouts_per_step=8",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=16",
    "evaluation.every_steps=0",
    "evaluation.prompts=8",
    "trainer.nodes=2",
    "trainer.ranks=2",
    "engine.replicas=2",
)
#: one node a role, where more prove nothing
ONE_NODE_EACH = ("trainer.nodes=1", "trainer.ranks=1", "engine.replicas=1")
#: a run of probes, which are light: what Slurm and the supervisor do is the same
PROBES = ("trainer.nodes=2", "trainer.ranks=2", "engine.replicas=2", "job.payload=probe")


class SlurmLab:
    """A runs root of its own, a cluster, and commands in it."""

    def __init__(self, directory: Path, model: Path, cluster: DevCluster, **profile_changes: Any) -> None:
        self.runs_root = directory / "runs"
        self.model, self.cluster = model, cluster
        # jobs start clean: what this checkout is imported by is named in the profile
        profile = yaml.safe_load((ROOT / "clusters" / "devcluster.yaml").read_text())
        launch: dict[str, Any] = {"inherit": ["PYTHONPATH"]}
        commands = Path(shutil.which("srun") or "/usr/bin/srun").parent
        if commands != Path("/usr/bin"):  # another Slurm than that of the system: jobs use it, too
            launch["path"] = [str(commands)]
        profile |= {"launch": launch, **profile_changes}
        self.profile = directory / "devcluster.yaml"
        self.profile.write_text(yaml.safe_dump(profile))
        self.env = {
            **os.environ,
            **cluster.environment(),
            "PYTHONPATH": str(ROOT),
            "HPCRL_RUNS_ROOT": str(self.runs_root),
        }

    def hpcrl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command, limit_s = [HPCRL, *arguments], 240.0 * patience()
        result = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, check=False, timeout=limit_s
        )
        if check:
            assert result.returncode == 0, f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def salloc(self, nodes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One hpcrl command inside of an allocation of whole nodes."""
        options = [f"--nodes={nodes}", "--exclusive", "--gres=gpu:h200:8", "--time=10"]
        return subprocess.run(
            ["salloc", *options, HPCRL, *arguments],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=300.0 * patience(),
        )

    def submit(self, name: str, *settings: str, recipe: str = "quickstart", small: bool = True) -> RunDir:
        """Submit a recipe, by default the quickstart with this lab's model on four nodes."""
        settings = self.settings(*settings) if small else settings
        sets = [part for setting in settings for part in ("--set", setting)]
        self.hpcrl("submit", recipe, "--cluster", str(self.profile), "--name", name, *sets)
        return RunDir(self.runs_root / name)

    def settings(self, *more: str) -> tuple[str, ...]:
        """What makes the quickstart small."""
        return (f"model.path={self.model}", *SMALL_RUN, *more)

    def listeners(self, run: RunDir) -> list[tuple[str, str, int]]:
        """Role (or program), address and port of everything in which a process of the run listens."""
        found = []
        for process in procfs.with_environ("HPCRL_RUN_ID", RunRecord.read(run).run_id):
            with contextlib.suppress(psutil.NoSuchProcess):
                whole = psutil.Process(process.pid)
                role = procfs.read_environ(process.pid).get("HPCRL_ROLE") or whole.name()
                ports = whole.net_connections("tcp")
                found += [(role, port.laddr.ip, port.laddr.port) for port in ports if port.status == "LISTEN"]
        return sorted(set(found))

    def json(self, *arguments: str) -> Any:
        return json.loads(self.hpcrl(*arguments, "--json").stdout)

    def wait_state(self, run: RunDir, states: Sequence[str], timeout_s: float = 120.0) -> Any:
        """Wait until the run is in one of the states; returns its status. A run that is not says what came of it."""
        try:
            return wait_for(
                lambda: status if (status := status_of(run))["state"] in states else None,
                timeout_s,
                f"{run.name} in {states}",
                every_s=_ASK_S,
            )
        except AssertionError as late:
            said = self.hpcrl("why", run.name, "--events", check=False).stdout
            raise AssertionError(f"{late}; it is {status_of(run)['state']}:\n{said}") from late

    def wait_attempt(self, run: RunDir, attempt: int, timeout_s: float = 120.0) -> Any:
        """Wait until the run is in an attempt and runs; returns its status."""

        def begun() -> Any:
            status = status_of(run)
            return status if (status["state"], status["attempt"]) == ("RUNNING", attempt) else None

        return wait_for(begun, timeout_s, f"attempt {attempt} of {run.name}", every_s=_ASK_S)

    def preempt(self) -> None:
        """An urgent job that needs every node, for a few seconds."""
        nodes = self.cluster.record().settings.nodes
        command = [
            "sbatch",
            "--partition=urgent",
            f"--nodes={nodes}",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=sleep 5",
        ]
        subprocess.run(command, env=self.env, check=True, capture_output=True)

    def end_all(self) -> None:
        """Cancel what is left of the test."""
        subprocess.run(["scancel", "--me"], env=self.env, check=False, capture_output=True)
        self.wait_empty()

    def wait_empty(self, timeout_s: float = 60.0) -> None:
        """Nothing of any run is left: no job, no process."""
        wait_for(lambda: not self.alive_jobs(), timeout_s, "empty queue", every_s=_ASK_S)
        for run in self.runs_root.glob("[!.]*"):
            run_id = RunRecord.read(RunDir(run)).run_id
            wait_for(
                lambda run_id=run_id: not procfs.with_environ("HPCRL_RUN_ID", run_id),
                20.0,
                "processes gone",
                every_s=_ASK_S,
            )

    def alive_jobs(self) -> list[str]:
        """One line a job in the queue."""
        result = subprocess.run(["squeue", "--noheader"], env=self.env, capture_output=True, text=True, check=True)
        return result.stdout.split("\n")[:-1]

    def client(self) -> SlurmClient:
        return self.cluster.client()


class SharedRun:
    """One run for all tests of a module, in any order: after one that has ended, or failed a test, comes another.

    A test that takes it finds it running with all of its replicas and a checkpoint of its newest attempt, and leaves it
    running, or ends it.
    """

    def __init__(self, lab: SlurmLab, *settings: str) -> None:
        self.lab, self._settings = lab, settings
        self._run: RunDir | None = None
        self._count = 0

    def taken(self, request: pytest.FixtureRequest) -> Iterator[RunDir]:
        """The run, for the fixture of a test; nobody else gets one that a failed test has left."""
        failed = request.session.testsfailed
        yield self._take()
        if request.session.testsfailed > failed:
            self._run = None

    def _take(self) -> RunDir:
        if self._run is None or not self._runs(self._run):
            self.lab.end_all()
            self._count += 1
            self._run = self.lab.submit(f"shared-{self._count}", *self._settings)
        run = self._run
        wait_for(lambda: self._runs(run), 120.0, f"{run.name} with all replicas")
        # and with progress of its newest attempt: one that ends without any is not tried again
        attempt = run.attempts()[-1]
        wait_for(lambda: [r for r in read_metrics(run) if r.attempt == attempt], 120.0, "a step of the newest attempt")
        first = min(record.step for record in read_metrics(run) if record.attempt == attempt)
        wait_saved(run, max(4, first))
        return run

    def _runs(self, run: RunDir) -> bool:
        status = status_of(run)
        return status["state"] == "RUNNING" and {c["state"] for c in status["components"]} == {"READY"}


def slow(wait_s: float) -> str:
    """For a small run that is only watched: a step takes half of what a rollout waits for its environment."""
    return f"environments=[{{name: reverse, kind: words, task: reverse, latency: {{median_s: {wait_s}}}}}]"


def job_id(run: RunDir) -> int:
    return int(RunRecord.read(run).submissions[-1].job_id)


def wait_step(run: RunDir, step: int, timeout_s: float = 120.0) -> None:
    wait_for(lambda: [r for r in read_metrics(run) if r.step >= step], timeout_s, f"step {step}")


def wait_saved(run: RunDir, step: int, timeout_s: float = 120.0) -> None:
    """Wait for a whole checkpoint of a step, or of a later one: saves run beside the training."""
    ledger = CheckpointLedger(run.checkpoints_dir)
    wait_for(lambda: [saved for saved in ledger.steps() if saved >= step], timeout_s, f"checkpoint of step {step}")


def events(run: RunDir, kind: str, *, since_s: float = 0.0) -> list[Event]:
    """Events of a kind, the oldest first; ``since_s``: those that are later (Unix time)."""
    return [event for event in read_events(run, kind=kind) if event.time_s > since_s]
