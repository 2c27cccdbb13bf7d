"""Workers of environments on nodes of their own, on a real Slurm of virtual nodes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from patience import wait_for
from slurm_lab import ONE_NODE_EACH, ROOT, SlurmLab, events, job_id, wait_step

from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.status import RunStatus

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

ENDS = ["COMPLETED", "FAILED", "LOST", "CANCELLED"]
TESTS = Path(__file__).resolve().parents[1]
#: four workers, two on a node
WORKERS = (
    "environments=[{name: reverse, kind: custom, factory: 'waiting_environment:Waiting', args: {wait_s: 1.0}}]",
    "environment_workers={count: 4, per_node: 2, cpus: 2, memory_gib: 0.5}",
)


@pytest.fixture
def lab(slurm_lab: SlurmLab) -> SlurmLab:
    """A lab whose jobs find the environment of this test."""
    slurm_lab.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS)])
    return slurm_lab


def test_a_run_loses_two_workers_on_their_own_nodes(lab: SlurmLab, capsys: Any) -> None:
    run = lab.submit("workers", *ONE_NODE_EACH, *WORKERS, "trainer.steps=60", "checkpoint.every_steps=0")
    lab.wait_state(run, ["RUNNING", *ENDS])
    wait_step(run, 2)
    status = RunStatus.read(run)
    assert status is not None
    workers = {c.replica: c for c in status.components if c.role == "env"}
    nodes = {replica: component.nodes for replica, component in workers.items()}
    others = {node for c in status.components if c.role != "env" for node in c.nodes}
    assert len({node for each in nodes.values() for node in each}) == 2
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert not others & {node for each in nodes.values() for node in each}
    fault_s = time.time()
    for replica in (1, 2):
        pid = workers[replica].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    lost = wait_for(lambda: told if len(told := events(run, "env.lost")) == 2 else None, 10.0, "env.lost")
    back = wait_for(lambda: told if len(told := events(run, "env.back")) == 2 else None, 15.0, "env.back")
    with capsys.disabled():
        seconds = [[round(event.time_s - fault_s, 2) for event in each] for each in (lost, back)]
        print(f"\ntwo workers killed: lost after {seconds[0]} s, back after {seconds[1]} s")
    assert {event.data["replica"] for event in lost} == {1, 2}
    ended = lab.wait_state(run, ENDS, timeout_s=300)
    assert ended["state"] == "COMPLETED", lab.hpcrl("why", run.name, "--events").stdout
    assert [record.step for record in read_metrics(run)] == list(range(1, 61))
    assert run.attempts() == [1]
    counts = read_metrics(run)[-1].rollouts
    assert 0 < counts["dropped_environment"] <= sum(event.data["calls"] for event in lost)
    restarts = {c["replica"]: c["restarts"] for c in ended["components"] if c["role"] == "env"}
    assert restarts == {0: 0, 1: 1, 2: 1, 3: 0}
    assert "nothing was lost, and nothing trained twice" in lab.hpcrl("rollouts", "verify", run.name).stdout
    lab.wait_empty()


def test_workers_have_parts_of_nodes_and_other_jobs_the_rest(lab: SlurmLab) -> None:
    run = lab.submit("parts", *ONE_NODE_EACH, *WORKERS, "job.payload=probe")
    status = lab.wait_state(run, ENDS)
    assert status["state"] == "COMPLETED", lab.hpcrl("why", run.name).stdout
    component = lab.client().details(job_id(run))[-1]
    assert (component["NumNodes"], component["NumCPUs"], component["OverSubscribe"]) == ("2", "8", "OK")
