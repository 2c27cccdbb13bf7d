"""Faults on a real Slurm of virtual nodes: how each ends, what `why` says, and that nothing is left."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from slurm_lab import SlurmLab, events, job_id, wait_step

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def running(slurm_lab: SlurmLab) -> RunDir:
    """A heterogeneous job with some steps and checkpoints behind it."""
    run = slurm_lab.submit("victim", "trainer.steps=4000", "checkpoint.every_steps=2", "job.layout=hetjob")
    wait_step(run, 5)
    return run


def pid(run: RunDir, role: str) -> int:
    status = RunStatus.read(run)
    assert status is not None
    if role == "supervisor":
        return status.supervisor.pid
    found = next(c.pid for c in status.components if c.role == role)
    assert found is not None
    return found


def why(slurm_lab: SlurmLab, run: RunDir) -> Any:
    return slurm_lab.json("why", run.name)


@pytest.mark.parametrize("role", ["engine", "orchestrator", "trainer"])
def test_killed_role_ends_the_run_and_is_named(role: str, running: RunDir, slurm_lab: SlurmLab) -> None:
    os.kill(pid(running, role), signal.SIGKILL)
    slurm_lab.wait_state(running, ["FAILED"], 60)
    cause = why(slurm_lab, running)["cause"]
    assert (cause["role"], cause["signal"]) == (role, signal.SIGKILL)
    slurm_lab.wait_empty()


def test_killed_supervisor_leaves_nothing(running: RunDir, slurm_lab: SlurmLab) -> None:
    os.kill(pid(running, "supervisor"), signal.SIGKILL)
    slurm_lab.wait_state(running, ["LOST"], 60)
    assert "Slurm says" in why(slurm_lab, running)["sentence"]
    slurm_lab.wait_empty()


def test_cancelled_component_is_named(running: RunDir, slurm_lab: SlurmLab) -> None:
    slurm_lab.client().cancel(job_id(running), component=1)
    slurm_lab.wait_state(running, ["CANCELLED"], 60)
    assert "was ended by Slurm" in why(slurm_lab, running)["sentence"]
    slurm_lab.wait_empty()


def test_run_goes_on_after_a_node_went_down(running: RunDir, slurm_lab: SlurmLab) -> None:
    status = RunStatus.read(running)
    assert status is not None
    node = next(c.nodes[0] for c in status.components if c.role == "engine")
    slurm_lab.cluster.kill_node(node)
    try:
        slurm_lab.wait_state(running, ["REQUEUED"], 60)
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
