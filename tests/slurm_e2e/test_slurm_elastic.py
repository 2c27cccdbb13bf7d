"""The layout elastic on a real Slurm: replicas are jobs of their own that come, are lost, come back and leave."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from observed import status_of
from patience import wait_for
from slurm_lab import HPCRL, ROOT, SharedRun, SlurmLab, events, slow, wait_step

from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(600)]

ENDS = ["COMPLETED", "FAILED", "LOST", "CANCELLED"]
LONG = (slow(2.0), "trainer.steps=4000", "checkpoint.every_steps=2", "job.layout=elastic")


def engines(run: RunDir) -> dict[int, Any]:
    """Engines by number, as `hpcrl status --json` shows them."""
    found = status_of(run)["components"]
    return {c["replica"]: c for c in found if c["role"] == "engine"}


def ready(run: RunDir, count: int, lost: Mapping[int, Any] | None = None) -> dict[int, Any]:
    """Wait until so many engines there are, all ready, and those that were ``lost`` in another life."""

    def again(replica: int, component: Any) -> bool:
        before = (lost or {}).get(replica)
        return before is None or component["started_at_s"] != before["started_at_s"]

    def look() -> dict[int, Any] | None:
        found = engines(run)
        there = all(c["state"] == "READY" and again(replica, c) for replica, c in found.items())
        return found if len(found) == count and there else None

    return dict(wait_for(look, 90.0, f"{count} engines ready", every_s=0.3))


def served(run: RunDir, engine: str, after_s: float) -> bool:
    """Whether an engine has taken a policy version since a moment."""
    return any(e.data["engine"] == engine and e.time_s > after_s for e in events(run, "engine.weights_updated"))


@pytest.fixture(scope="module")
def shared(shared_lab: SlurmLab) -> SharedRun:
    return SharedRun(shared_lab, *LONG)


@pytest.fixture
def running(shared: SharedRun, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    """An elastic run with two engines and some steps behind it, which the tests of this file share."""
    for run in shared.taken(request):
        ready(run, 2)
        yield run


def test_cancelled_engine_job_is_replaced_and_the_run_continues(running: RunDir, shared_lab: SlurmLab) -> None:
    before, attempt, fault_s = engines(running), running.attempts()[-1], time.time()
    shared_lab.client().cancel(before[1]["job"]["job_id"])
    (lost,) = wait_for(lambda: events(running, "replica.lost", since_s=fault_s), 30.0, "notice of the loss")
    assert lost.data["replica"] == 1
    step = read_metrics(running)[-1].step
    after = ready(running, 2, {1: before[1]})
    assert after[1]["job"]["job_id"] != before[1]["job"]["job_id"]
    assert after[1]["job"]["replaced"] == before[1]["job"]["replaced"] + 1
    assert f"job {before[1]['job']['job_id']} is CANCELLED" in after[1]["job"]["lost"]
    assert after[0]["job"]["job_id"] == before[0]["job"]["job_id"]
    wait_for(lambda: served(running, "engine-1", lost.time_s), 60.0, "policy version in the new engine")
    wait_step(running, step + 5)
    status = shared_lab.json("status", running.name)
    assert (status["state"], status["attempt"]) == ("RUNNING", attempt)
    assert f"job {before[1]['job']['job_id']} is CANCELLED" in shared_lab.hpcrl("why", running.name, "--events").stdout


def test_a_shell_finds_an_engine_in_a_job_of_its_own(running: RunDir, shared_lab: SlurmLab) -> None:
    found = status_of(running)["components"]
    said = "echo $HPCRL_ROLE $HPCRL_REPLICA $SLURMD_NODENAME $SLURM_JOB_ID; exit 6"
    for role, replica in (("engine", 1), ("trainer", 0)):
        (component,) = [c for c in found if (c["role"], c["replica"]) == (role, replica)]
        (node,) = component["nodes"][:1]
        entered = shared_lab.hpcrl(
            "shell", running.name, "--role", f"{role}/{replica}", "--", "sh", "-c", said, check=False
        )
        assert entered.returncode == 6, entered.stderr
        # the job is that of the step that the role itself runs in
        job_id = component["job"]["job_id"] if role == "engine" else int(RunRecord.read(running).submissions[-1].job_id)
        assert entered.stdout.split() == [role, str(replica), node, str(job_id)]


def test_requeued_engine_job_joins_again(running: RunDir, shared_lab: SlurmLab) -> None:
    before, fault_s = engines(running), time.time()
    shared_lab.client().requeue(before[0]["job"]["job_id"])
    wait_for(lambda: events(running, "replica.lost", since_s=fault_s), 30.0, "notice of the loss")
    after = ready(running, 2, {0: before[0]})
    assert after[0]["job"]["job_id"] == before[0]["job"]["job_id"]
    assert after[0]["job"]["replaced"] == before[0]["job"]["replaced"]
    assert shared_lab.json("status", running.name)["state"] == "RUNNING"


def test_scale_down_and_up_while_running(running: RunDir, shared_lab: SlurmLab) -> None:
    begin_s = time.time()
    shared_lab.hpcrl("scale", running.name, "engine=1")
    ready(running, 1)
    wait_for(lambda: len(shared_lab.alive_jobs()) == 2, 30.0, "two jobs")
    step = read_metrics(running)[-1].step
    wait_step(running, step + 3)
    shared_lab.hpcrl("scale", running.name, "engine=3")
    ready(running, 3)
    step = read_metrics(running)[-1].step
    wait_step(running, step + 3)
    assert shared_lab.json("status", running.name)["state"] == "RUNNING"
    assert not events(running, "replica.lost", since_s=begin_s)
    added = {event.data["engine"] for event in events(running, "engine.added", since_s=begin_s)}
    assert added >= {"engine-1", "engine-2"}
    shared_lab.hpcrl("scale", running.name, "engine=2")
    ready(running, 2)


def test_all_engines_lost_then_back(running: RunDir, shared_lab: SlurmLab) -> None:
    before, attempt, fault_s = engines(running), running.attempts()[-1], time.time()
    for engine in before.values():
        shared_lab.client().cancel(engine["job"]["job_id"])
    wait_for(lambda: len(events(running, "replica.lost", since_s=fault_s)) == 2, 30.0, "notice of both losses")
    ready(running, 2, before)
    step = read_metrics(running)[-1].step
    wait_step(running, step + 3)
    assert shared_lab.json("status", running.name)["attempt"] == attempt


def test_engine_node_down_is_a_lost_replica(running: RunDir, shared_lab: SlurmLab) -> None:
    before, attempt, fault_s = engines(running)[0], running.attempts()[-1], time.time()
    (node,) = before["nodes"]
    known = {entry.node for entry in read_exclusions(running, now_s=fault_s)}
    shared_lab.cluster.kill_node(node)
    try:
        wait_for(lambda: events(running, "replica.lost", since_s=fault_s), 60.0, "notice of the loss")
        step = read_metrics(running)[-1].step
        after = ready(running, 2, {0: before})
    finally:
        shared_lab.cluster.revive_node(node)
    assert after[0]["nodes"] != [node]
    assert {entry.node for entry in read_exclusions(running, now_s=time.time())} - known == {node}
    wait_step(running, step + 3)
    assert shared_lab.json("status", running.name)["attempt"] == attempt


def test_trainer_node_down_continues_with_the_same_engine_jobs(running: RunDir, shared_lab: SlurmLab) -> None:
    status, fault_s = RunStatus.read(running), time.time()
    assert status is not None
    attempt = status.attempt + 1
    jobs = {replica: c["job"]["job_id"] for replica, c in engines(running).items()}
    node = next(c.nodes[0] for c in status.components if c.role == "trainer")
    shared_lab.cluster.kill_node(node)
    try:
        wait_for(lambda: status_of(running)["attempt"] >= attempt, 90.0, "next attempt")
        after = shared_lab.wait_state(running, ["RUNNING"], 90)["attempt"]
        ready(running, 2)
    finally:
        shared_lab.cluster.revive_node(node)
    assert {replica: c["job"]["job_id"] for replica, c in engines(running).items()} == jobs
    assert events(running, "trainer.restored", since_s=fault_s)[0].data["step"] >= 4
    # for each allocation in which Slurm made no step (`test_slurm_requeue.py`) one more, and no other
    ended = [event.data for event in events(running, "run.state", since_s=fault_s) if event.data["state"] == "REQUEUED"]
    assert [data["cause_kind"] for data in ended] == ["no_step"] * (after - attempt)
    wait_for(lambda: [r for r in read_metrics(running) if r.attempt == after], 60.0, "step of the next attempt")


def test_killed_supervisor_ends_all_jobs(running: RunDir, shared_lab: SlurmLab) -> None:
    status = RunStatus.read(running)
    assert status is not None
    os.kill(status.supervisor.pid, signal.SIGKILL)
    shared_lab.wait_state(running, ["LOST"], 60)
    shared_lab.wait_empty()


@pytest.mark.parametrize(
    ("dies_at", "then"), [("hpcrl-half", "cancel"), ("hpcrl-half-engine-0", "cancel"), ("hpcrl-half-engine-0", "wait")]
)
def test_submit_killed_half_way(dies_at: str, then: str, slurm_lab: SlurmLab) -> None:
    """Some jobs are in the queue, others are not: the supervisor submits what is missing, or a cancel ends all."""
    wrapper = slurm_lab.runs_root.parent / "bin"
    wrapper.mkdir()
    sbatch = shutil.which("sbatch", path=slurm_lab.env["PATH"])
    script = wrapper / "sbatch"
    # the submit dies between sbatch and what it would do with its answer, however fast the machine is
    script.write_text(f'#!/bin/sh\n{sbatch} "$@"\ncase " $* " in *"--job-name={dies_at} "*) kill -9 $PPID ;; esac\n')
    script.chmod(0o755)
    env = {**slurm_lab.env, "PATH": f"{wrapper}:{slurm_lab.env['PATH']}"}
    shape = ("trainer.nodes=1", "trainer.ranks=1")
    sets = [part for s in slurm_lab.settings(*LONG, *shape) for part in ("--set", s)]
    command = [HPCRL, "submit", "quickstart", "--cluster", str(slurm_lab.profile), "--name", "half", *sets]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    run = RunDir(slurm_lab.runs_root / "half")
    if then == "wait":
        ready(run, 2)
        wait_step(run, 2)
    slurm_lab.hpcrl("cancel", run.name, "--yes", check=then == "wait")
    slurm_lab.wait_empty()
    assert slurm_lab.json("status", run.name)["state"] in ("CANCELLED", "LOST", "FAILED")


def test_cancel_while_waiting_removes_all_jobs(slurm_lab: SlurmLab) -> None:
    run = slurm_lab.submit("waits", *LONG, "trainer.nodes=26", "trainer.ranks=26", "job.time_limit_h=1")
    slurm_lab.hpcrl("cancel", run.name, "--yes")
    slurm_lab.wait_empty()
    assert slurm_lab.json("status", run.name)["state"] == "CANCELLED"
