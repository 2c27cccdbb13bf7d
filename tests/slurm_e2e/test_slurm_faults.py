"""Faults on a real Slurm of virtual nodes: how each ends, what `why` says, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from patience import wait_for
from slurm_lab import ONE_NODE_EACH, PROBES, SharedRun, SlurmLab, events, job_id, slow, wait_saved, wait_step
from virtual_site import wait_written

from hpcrl.processes import procfs
from hpcrl.processes.environment_marks import KIND_VARIABLE
from hpcrl.runs.exclusions import exclude
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentStatus, RunStatus
from hpcrl.slurm.states import JobState
from hpcrl.trainer.launcher import RANK_NAME

HETJOB = "job.layout=hetjob"
#: a node that says nothing for 30 s is down
AWAY_S = 40.0
ENDS = ["COMPLETED", "FAILED", "LOST", "CANCELLED"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def shared(shared_lab: SlurmLab) -> SharedRun:
    length = ("trainer.steps=100000", "checkpoint.every_steps=2", "job.retry_failures=20")
    # two ranks on one node: of another node's there is a probe below
    return SharedRun(shared_lab, *length, *ONE_NODE_EACH, "trainer.ranks=2", HETJOB)


@pytest.fixture
def running(shared: SharedRun, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    """A heterogeneous job with some steps and checkpoints behind it, which the tests of this file share."""
    yield from shared.taken(request)


@pytest.fixture
def held(probe_lab: SlurmLab) -> RunDir:
    """A heterogeneous job whose ranks are probes that stay: what Slurm and the supervisor do is the same."""
    run = probe_lab.submit("held", *PROBES, HETJOB, small=False)
    probe_lab.wait_state(run, ["RUNNING"], 90)
    return run


def pid(run: RunDir, role: str) -> int:
    status = RunStatus.read(run)
    assert status is not None
    if role == "supervisor":
        return status.supervisor.pid
    if role == "trainer rank":
        mine = (psutil.Process(p.pid) for p in procfs.with_environ("HPCRL_RUN_ID", RunRecord.read(run).run_id))
        return next(process.pid for process in mine if process.name() == RANK_NAME.format(1))
    found = next(c.pid for c in status.components if c.role == role)
    assert found is not None
    return found


def tasks(run: RunDir, role: str) -> list[procfs.Process]:
    """What guards have started for a role, one process on each of its nodes: not the ranks below."""
    mine = procfs.with_environ("HPCRL_RUN_ID", RunRecord.read(run).run_id)
    environs = ((process, procfs.read_environ(process.pid)) for process in mine)
    found = [p for p, env in environs if (env.get(KIND_VARIABLE), env.get("HPCRL_ROLE")) == ("role", role)]
    return [p for p in found if not psutil.Process(p.pid).name().startswith(RANK_NAME.format(""))]


def excluded(slurm_lab: SlurmLab, run: RunDir) -> list[str]:
    """``ExcNodeList`` of each component of the job."""
    return [record["ExcNodeList"] for record in slurm_lab.client().details(job_id(run))]


def why(slurm_lab: SlurmLab, run: RunDir) -> Any:
    return slurm_lab.json("why", run.name)


def test_killed_engine_is_restarted_in_its_step(running: RunDir, shared_lab: SlurmLab) -> None:
    def engine() -> ComponentStatus:
        status = RunStatus.read(running)
        assert status is not None
        return next(c for c in status.components if c.role == "engine")

    attempts, before = running.attempts(), engine()
    os.kill(pid(running, "engine"), signal.SIGKILL)

    def back() -> bool:
        now = engine()
        return now.restarts == before.restarts + 1 and now.state == "READY"

    wait_for(back, 90, "engine to be back")
    assert shared_lab.json("status", running.name)["state"] == "RUNNING"
    assert running.attempts() == attempts


@pytest.mark.parametrize("role", ["orchestrator", "trainer", "trainer rank"])
def test_after_a_killed_role_the_next_attempt_begins_in_the_same_job(
    role: str, running: RunDir, shared_lab: SlurmLab
) -> None:
    job, attempt, fault_s = job_id(running), running.attempts()[-1], time.time()
    os.kill(pid(running, role), signal.SIGKILL)
    wait_for(lambda: (status := RunStatus.read(running)) and status.attempt == attempt + 1, 60, "next attempt")
    shared_lab.wait_state(running, ["RUNNING"], 60)
    wait_for(lambda: events(running, "trainer.restored", since_s=fault_s), 60, "the checkpoint")
    assert events(running, "trainer.restored", since_s=fault_s)[0].data["step"] >= 4
    assert job_id(running) == job
    told = "trainer 0 lost its rank 1, which" if role == "trainer rank" else f"{role} 0"
    assert f"{told} was killed by SIGKILL" in why(shared_lab, running)["earlier"][str(attempt)]


def test_run_continues_after_a_node_went_down(running: RunDir, shared_lab: SlurmLab) -> None:
    status = RunStatus.read(running)
    assert status is not None
    fault_s = time.time()
    node = next(c.nodes[0] for c in status.components if c.role == "engine")

    def ends() -> list[str]:
        return [event.data["state"] for event in events(running, "run.state", since_s=fault_s)]

    shared_lab.cluster.kill_node(node)
    try:
        wait_for(lambda: "REQUEUED" in ends(), 60, "the requeue")
        # told by the dying supervisor: Slurm would take the node again as soon as it answers
        wait_for(lambda: excluded(shared_lab, running) == [node, node], 20, "excluded nodes")
        status_now = shared_lab.wait_attempt(running, status.attempt + 1)
    finally:
        shared_lab.cluster.revive_node(node)
    assert node not in {name for c in status_now["components"] for name in c["nodes"]}
    restored = wait_for(lambda: events(running, "trainer.restored", since_s=fault_s), 60, "the checkpoint")
    assert restored[0].data["step"] >= 4
    assert f"node {node} went down" in why(shared_lab, running)["earlier"][str(status.attempt)]


def test_silent_controller_is_a_warning(running: RunDir, shared_lab: SlurmLab) -> None:
    attempts = running.attempts()
    undo = wait_written(shared_lab.cluster)
    shared_lab.cluster.pause_controller(kill=True)
    try:
        status = shared_lab.json("status", running.name)
        assert status["state"] == "RUNNING"
        assert status["job"]["warning"]
    finally:
        shared_lab.cluster.resume_controller()
        undo()
    # the controller knows the job again, and nobody has ended it
    job = wait_for(lambda: shared_lab.client().jobs([job_id(running)]).get(job_id(running)), 30, "the job")
    assert job.state is JobState.RUNNING
    assert running.attempts() == attempts
    # it asks nodes anew: before they have answered none is left to be used in place of another
    wait_for(lambda: sum(node.usable for node in shared_lab.client().nodes()) >= 10, 60, "nodes that have answered")


def test_a_cancelled_run_is_resumed_away_from_broken_nodes(running: RunDir, shared_lab: SlurmLab) -> None:
    wait_saved(running, 6)
    shared_lab.hpcrl("cancel", running.name, "--yes")
    told = shared_lab.json("status", running.name)
    assert (told["state"], told["cause"]["kind"]) == ("CANCELLED", "cancelled")
    shared_lab.wait_empty()
    status = RunStatus.read(running)
    assert status is not None
    used = sorted({node for c in status.components for node in c.nodes})
    exclude(running, dict.fromkeys(used, "a test"), attempt=status.attempt, now_s=time.time(), seconds=3600.0)
    resumed_s = time.time()
    shared_lab.hpcrl("resume", running.name)
    shared_lab.wait_state(running, ["RUNNING"], 90)
    status = RunStatus.read(running)
    assert status is not None
    assert not set(used) & {node for c in status.components for node in c.nodes}
    assert events(running, "trainer.restored", since_s=resumed_s)[-1].data["step"] >= 6


def test_killed_supervisor_leaves_nothing(running: RunDir, shared_lab: SlurmLab) -> None:
    os.kill(pid(running, "supervisor"), signal.SIGKILL)
    shared_lab.wait_state(running, ["LOST"], 60)
    assert "Slurm says" in why(shared_lab, running)["sentence"]
    shared_lab.wait_empty()


def test_without_retries_a_killed_role_ends_the_run_and_is_named(probe_lab: SlurmLab) -> None:
    """Killed on the second node of its replica: the first one's task ends with it."""
    run = probe_lab.submit("once", *PROBES, "job.retry_failures=0", small=False)
    probe_lab.wait_state(run, ["RUNNING"], 90)
    wait_for((run.attempt_dir(1) / "probe/trainer-0-1.json").exists, 60, "the report of the second node")
    first = pid(run, "trainer")
    (second,) = {p.pid for p in tasks(run, "trainer")} - {first}
    os.kill(second, signal.SIGKILL)
    probe_lab.wait_state(run, ["FAILED"], 60)
    cause = why(probe_lab, run)["cause"]
    assert (cause["role"], cause["signal"]) == ("trainer", signal.SIGKILL)
    probe_lab.wait_empty()


@pytest.mark.parametrize("component", [0, 1])
def test_cancelled_component_is_named(component: int, held: RunDir, probe_lab: SlurmLab) -> None:
    probe_lab.client().cancel(job_id(held), component=component)
    probe_lab.wait_state(held, ["CANCELLED"], 60)
    told = why(probe_lab, held)
    assert told["cause"]["kind"] == "cancelled"
    assert f"job {job_id(held)} was ended by Slurm (scancel" in told["sentence"]
    probe_lab.wait_empty()


@pytest.mark.campaign
def test_run_completes_although_the_controller_was_away(slurm_lab: SlurmLab) -> None:
    """For longer than nodes may be silent, and four times as long as one command of Slurm waits."""
    run = slurm_lab.submit("away", *ONE_NODE_EACH, slow(2.0), "trainer.steps=60", HETJOB)
    wait_step(run, 5)
    slurm_lab.cluster.pause_controller()
    try:
        paused, step = time.monotonic(), read_metrics(run)[-1].step
        status = slurm_lab.json("status", run.name)
        assert status["state"] in ("RUNNING", "COMPLETED")
        assert status["job"] is None or "Slurm has not answered" in status["job"]["warning"]
        time.sleep(max(0.0, AWAY_S - (time.monotonic() - paused)))
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


@pytest.mark.campaign
def test_preempted_run_saves_and_continues(slurm_lab: SlurmLab) -> None:
    """The site sends our signal when it preempts (`PreemptParameters=send_user_signal`)."""
    run = slurm_lab.submit("preempted", *ONE_NODE_EACH, "trainer.steps=40", "checkpoint.every_steps=0", HETJOB)
    wait_step(run, 5)
    slurm_lab.preempt()
    goes_on_and_completes(slurm_lab, run)
    saved, restored = events(run, "supervisor.saved"), events(run, "trainer.restored")
    assert saved, why(slurm_lab, run)["earlier"]
    assert saved[0].data["step"] == restored[0].data["step"] >= 5


@pytest.mark.campaign
def test_preempted_run_continues_where_the_site_sends_no_signal(slurm_lab: SlurmLab) -> None:
    """All that the job gets then is SIGTERM to its steps, as by a cancel: it goes on from the checkpoint before."""
    conf = slurm_lab.cluster.paths.conf
    before = conf.read_text()
    signalling = [line for line in before.splitlines() if "send_user_signal" in line]
    assert signalling
    conf.write_text(before.replace(signalling[0], ""))
    reconfigure(slurm_lab)
    try:
        run = slurm_lab.submit("terminated", *ONE_NODE_EACH, "trainer.steps=40", "checkpoint.every_steps=2", HETJOB)
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


@pytest.mark.campaign
def test_time_limit_saves_and_continues(slurm_lab: SlurmLab) -> None:
    """The warning comes 90 to 150 s before the end, which leaves the first attempt a minute or two."""
    run = slurm_lab.submit(
        "limited",
        *ONE_NODE_EACH,
        slow(4.0),
        "trainer.steps=100000",
        "checkpoint.every_steps=0",
        HETJOB,
        "job.time_limit_h=0.066",
    )
    wait_for(lambda: events(run, "trainer.restored"), 240, "second attempt")
    saved, restored = events(run, "supervisor.saved"), events(run, "trainer.restored")
    assert saved[0].data["step"] == restored[0].data["step"] >= 1
    slurm_lab.hpcrl("cancel", run.name, "--yes")
    slurm_lab.wait_empty()
