"""Faults on a real Slurm of virtual nodes: how each ends, what `why` says, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import psutil
import pytest
from patience import wait_for
from slurm_lab import SlurmLab, events, job_id, wait_saved, wait_step

from hpcrl import procfs
from hpcrl.runs.exclusions import exclude
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus

ENDS = ["COMPLETED", "FAILED", "LOST", "CANCELLED"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def running(slurm_lab: SlurmLab) -> RunDir:
    """A heterogeneous job with some steps and checkpoints behind it."""
    run = slurm_lab.submit("victim", "trainer.steps=4000", "checkpoint.every_steps=2", "job.layout=hetjob")
    wait_saved(run, 4)
    return run


def pid(run: RunDir, role: str) -> int:
    status = RunStatus.read(run)
    assert status is not None
    if role == "supervisor":
        return status.supervisor.pid
    if role == "trainer rank":
        mine = (psutil.Process(p.pid) for p in procfs.with_environ("HPCRL_RUN_ID", RunRecord.read(run).run_id))
        return next(p.pid for p in mine if p.environ().get("RANK") == "1")
    found = next(c.pid for c in status.components if c.role == role)
    assert found is not None
    return found


def excluded(slurm_lab: SlurmLab, run: RunDir) -> list[str]:
    """``ExcNodeList`` of each component of the job."""
    return [record["ExcNodeList"] for record in slurm_lab.client().details(job_id(run))]


def why(slurm_lab: SlurmLab, run: RunDir) -> Any:
    return slurm_lab.json("why", run.name)


@pytest.mark.parametrize("role", ["orchestrator", "trainer", "trainer rank"])
def test_after_a_killed_role_the_next_attempt_begins_in_the_same_job(
    role: str, running: RunDir, slurm_lab: SlurmLab
) -> None:
    job = job_id(running)
    os.kill(pid(running, role), signal.SIGKILL)
    wait_for(lambda: (status := RunStatus.read(running)) and status.attempt == 2, 60, "second attempt")
    slurm_lab.wait_state(running, ["RUNNING"], 60)
    wait_for(lambda: events(running, "trainer.restored"), 60, "the checkpoint")
    assert events(running, "trainer.restored")[0].data["step"] >= 4
    assert job_id(running) == job
    told = "trainer 0 lost its rank 1, which" if role == "trainer rank" else f"{role} 0"
    assert f"{told} was killed by SIGKILL" in why(slurm_lab, running)["earlier"]["1"]
    slurm_lab.hpcrl("cancel", running.name, "--yes")
    slurm_lab.wait_empty()


def test_without_retries_a_killed_role_ends_the_run_and_is_named(slurm_lab: SlurmLab) -> None:
    run = slurm_lab.submit("once", "trainer.steps=4000", "checkpoint.every_steps=2", "job.retry_failures=0")
    wait_step(run, 5)
    os.kill(pid(run, "trainer"), signal.SIGKILL)
    slurm_lab.wait_state(run, ["FAILED"], 60)
    cause = why(slurm_lab, run)["cause"]
    assert (cause["role"], cause["signal"]) == ("trainer", signal.SIGKILL)
    slurm_lab.wait_empty()


def test_killed_engine_is_restarted_in_its_step(running: RunDir, slurm_lab: SlurmLab) -> None:
    os.kill(pid(running, "engine"), signal.SIGKILL)

    def back() -> bool:
        status = RunStatus.read(running)
        assert status is not None
        engine = next(c for c in status.components if c.role == "engine")
        return engine.restarts == 1 and engine.state == "READY"

    wait_for(back, 90, "engine to be back")
    assert slurm_lab.json("status", running.name)["state"] == "RUNNING"
    assert RunDir(running.path).attempts() == [1]
    slurm_lab.hpcrl("cancel", running.name, "--yes")
    slurm_lab.wait_empty()


def test_killed_supervisor_leaves_nothing(running: RunDir, slurm_lab: SlurmLab) -> None:
    os.kill(pid(running, "supervisor"), signal.SIGKILL)
    slurm_lab.wait_state(running, ["LOST"], 60)
    assert "Slurm says" in why(slurm_lab, running)["sentence"]
    slurm_lab.wait_empty()


@pytest.mark.parametrize("component", [0, 1])
def test_cancelled_component_is_named(component: int, running: RunDir, slurm_lab: SlurmLab) -> None:
    slurm_lab.client().cancel(job_id(running), component=component)
    slurm_lab.wait_state(running, ["CANCELLED"], 60)
    told = why(slurm_lab, running)
    assert told["cause"]["kind"] == "cancelled"
    assert f"job {job_id(running)} was ended by Slurm (scancel" in told["sentence"]
    slurm_lab.wait_empty()


def test_run_goes_on_after_a_node_went_down(running: RunDir, slurm_lab: SlurmLab) -> None:
    status = RunStatus.read(running)
    assert status is not None
    node = next(c.nodes[0] for c in status.components if c.role == "engine")
    slurm_lab.cluster.kill_node(node)
    try:
        slurm_lab.wait_state(running, ["REQUEUED"], 60)
        # told by the dying supervisor: Slurm would take the node again as soon as it answers
        wait_for(lambda: excluded(slurm_lab, running) == [node, node], 20, "excluded nodes")
        status_now = slurm_lab.wait_state(running, ["RUNNING"], 90)
    finally:
        slurm_lab.cluster.revive_node(node)
    assert status_now["attempt"] == 2
    assert node not in {name for c in status_now["components"] for name in c["nodes"]}
    assert events(running, "trainer.restored")[0].data["step"] >= 4
    assert f"node {node} went down" in why(slurm_lab, running)["earlier"]["1"]
    slurm_lab.hpcrl("cancel", running.name, "--yes")


def test_silent_controller_is_a_warning(running: RunDir, slurm_lab: SlurmLab) -> None:
    slurm_lab.cluster.pause_controller(kill=True)
    try:
        status = slurm_lab.json("status", running.name)
        assert status["state"] == "RUNNING"
        assert status["job"]["warning"]
    finally:
        slurm_lab.cluster.resume_controller()
    slurm_lab.hpcrl("cancel", running.name, "--yes")
    assert slurm_lab.json("status", running.name)["state"] == "CANCELLED"


def test_run_completes_although_the_controller_was_away_for_two_minutes(slurm_lab: SlurmLab) -> None:
    run = slurm_lab.submit("away", "trainer.steps=250", "job.layout=hetjob")
    wait_step(run, 5)
    slurm_lab.cluster.pause_controller()
    try:
        paused, step = time.monotonic(), read_metrics(run)[-1].step
        status = slurm_lab.json("status", run.name)
        assert status["state"] in ("RUNNING", "COMPLETED")
        assert status["job"] is None or "Slurm has not answered" in status["job"]["warning"]
        time.sleep(max(0.0, 120.0 - (time.monotonic() - paused)))
        assert read_metrics(run)[-1].step >= step + 10
    finally:
        slurm_lab.cluster.resume_controller()
    status = slurm_lab.wait_state(run, ENDS, 240)
    assert (status["state"], status["attempt"]) == ("COMPLETED", 1)
    # a job that ended meanwhile stays COMPLETING until the nodes repeat what the controller did not hear
    slurm_lab.wait_empty(300.0)


def goes_on_and_completes(slurm_lab: SlurmLab, run: RunDir) -> None:
    status = slurm_lab.wait_state(run, ENDS, 240)
    assert status["state"] == "COMPLETED", slurm_lab.hpcrl("why", run.name).stdout
    assert status["attempt"] >= 2
    assert status["progress"]["steps"] == status["progress"]["total_steps"]
    slurm_lab.wait_empty()


def test_preempted_run_saves_and_goes_on(slurm_lab: SlurmLab) -> None:
    """The site sends our signal when it preempts (`PreemptParameters=send_user_signal`)."""
    run = slurm_lab.submit("preempted", "trainer.steps=120", "checkpoint.every_steps=0", "job.layout=hetjob")
    wait_step(run, 5)
    slurm_lab.preempt()
    goes_on_and_completes(slurm_lab, run)
    saved, restored = events(run, "supervisor.saved"), events(run, "trainer.restored")
    assert saved[0].data["step"] == restored[0].data["step"] >= 5


def test_preempted_run_goes_on_where_the_site_sends_no_signal(slurm_lab: SlurmLab) -> None:
    """All that the job gets then is SIGTERM to its steps, as by a cancel: it goes on from the checkpoint before."""
    conf = slurm_lab.cluster.paths.conf
    before = conf.read_text()
    signalling = [line for line in before.splitlines() if "send_user_signal" in line]
    assert signalling
    conf.write_text(before.replace(signalling[0], ""))
    reconfigure(slurm_lab)
    try:
        run = slurm_lab.submit("terminated", "trainer.steps=120", "checkpoint.every_steps=2", "job.layout=hetjob")
        wait_saved(run, 4)
        slurm_lab.preempt()
        goes_on_and_completes(slurm_lab, run)
    finally:
        conf.write_text(before)
        reconfigure(slurm_lab)
    assert events(run, "trainer.restored")[0].data["step"] >= 4
    assert "preemption" in why(slurm_lab, run)["earlier"]["1"]


def reconfigure(slurm_lab: SlurmLab) -> None:
    subprocess.run(["scontrol", "reconfigure"], env=slurm_lab.env, check=True, capture_output=True)


def test_time_limit_saves_and_goes_on(slurm_lab: SlurmLab) -> None:
    """The warning comes 90 to 150 s before the end, which leaves the first attempt a minute or two."""
    run = slurm_lab.submit(
        "limited", "trainer.steps=100000", "checkpoint.every_steps=0", "job.layout=hetjob", "job.time_limit_h=0.066"
    )
    wait_for(lambda: events(run, "trainer.restored"), 240, "second attempt")
    saved, restored = events(run, "supervisor.saved"), events(run, "trainer.restored")
    assert saved[0].data["step"] == restored[0].data["step"] >= 1
    slurm_lab.hpcrl("cancel", run.name, "--yes")
    slurm_lab.wait_empty()


def test_broken_nodes_are_avoided_by_a_resume_until_they_are_needed(running: RunDir, slurm_lab: SlurmLab) -> None:
    slurm_lab.hpcrl("cancel", running.name, "--yes")
    slurm_lab.wait_empty()
    status = RunStatus.read(running)
    assert status is not None
    used = sorted({node for c in status.components for node in c.nodes})
    exclude(running, dict.fromkeys(used, "a test"), attempt=1, now_s=time.time(), seconds=3600.0)
    slurm_lab.hpcrl("resume", running.name)
    slurm_lab.wait_state(running, ["RUNNING"], 90)
    status = RunStatus.read(running)
    assert status is not None
    assert not set(used) & {node for c in status.components for node in c.nodes}
    slurm_lab.hpcrl("cancel", running.name, "--yes")
