"""Nodes that go down under a run with spare ones, on a real Slurm: the job goes on, and roles start on other nodes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from patience import wait_for
from slurm_lab import PROBES, ROOT, SlurmLab, events, job_id, wait_saved, wait_step
from virtual_site import virtual_site

from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, RunState, RunStatus
from hpcrl.slurm.hostlist import expand_hostlist

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

SPARES = "job.spare_nodes={trainer: 1, engine: 1}"


def running(run: RunDir, *, attempt: int, timeout_s: float = 120.0) -> RunStatus:
    """Wait until all replicas of an attempt are there."""

    def look() -> RunStatus | None:
        status = RunStatus.read(run)
        there = status is not None and status.attempt == attempt and status.state is RunState.RUNNING
        return status if there and all(c.state is ComponentState.READY for c in status.components) else None

    found = wait_for(look, timeout_s, f"attempt {attempt}")
    assert isinstance(found, RunStatus)
    return found


def nodes_of(status: RunStatus, role: str) -> list[str]:
    return [node for c in status.components if c.role == role for node in c.nodes]


def restarts(lab: SlurmLab, run: RunDir) -> set[str]:
    return {record["Restarts"] for record in lab.client().details(job_id(run))}


def trained_again(run: RunDir, attempt: int, fault: float) -> float:
    """Seconds from the loss of the node to the end of the first step of an attempt."""
    wait_for(lambda: [r for r in read_metrics(run) if r.attempt == attempt], 120.0, f"a step of attempt {attempt}")
    return time.monotonic() - fault


def check_replaced(lab: SlurmLab, *, noticed: bool) -> None:
    """Kill a trainer's node of a run with a spare one, and follow the run to its end."""
    settings = ("trainer.steps=40", "checkpoint.every_steps=2", "job.layout=hetjob", "job.spare_nodes={trainer: 1}")
    run = lab.submit("spared", *settings)
    wait_saved(run, 4)
    before = running(run, attempt=1)
    node, spare = nodes_of(before, "trainer")[1], before.spare_nodes[0]
    assert before.spare_nodes == [spare]
    fault = time.monotonic()
    lab.cluster.kill_node(node, noticed=noticed)
    try:
        after = running(run, attempt=2)
        seconds = trained_again(run, 2, fault)
        lab.wait_state(run, ["COMPLETED"], 240)
    finally:
        lab.cluster.revive_node(node)
    print(f"trained again {seconds:.1f} s after the node was lost ({'noticed' if noticed else 'unnoticed'} by Slurm)")
    assert nodes_of(after, "trainer") == sorted({*nodes_of(before, "trainer"), spare} - {node})
    assert nodes_of(after, "engine") == nodes_of(before, "engine")
    assert (after.spare_nodes, list(after.lost_nodes)) == ([], [node])
    assert restarts(lab, run) == {"0"}
    assert len(run.attempts()) == 2
    (replaced,) = events(run, "nodes.replaced")
    assert (list(replaced.data["nodes"]), replaced.data["spares"]) == ([node], [])
    assert [entry.node for entry in read_exclusions(run, now_s=time.time())] == [node]
    assert f"node {node} {'went down' if noticed else 'did not answer'}" in lab.json("why", run.name)["earlier"]["1"]
    assert events(run, "trainer.restored")[-1].data["step"] >= 4
    lab.hpcrl("rollouts", "verify", run.name)
    assert [record.step for record in read_metrics(run)] == list(range(1, 41))


def test_a_trainer_node_is_replaced_without_a_requeue(slurm_lab: SlurmLab) -> None:
    check_replaced(slurm_lab, noticed=True)


@pytest.mark.campaign
def test_a_node_that_slurm_does_not_miss_yet_is_replaced(tmp_path: Path, start_model: Path) -> None:
    """Slurm waits for minutes until it calls a node down, on a site as by default."""
    for cluster in virtual_site("patient", nodes=6, node_timeout_s=600):
        lab = SlurmLab(tmp_path, start_model, cluster)
        check_replaced(lab, noticed=False)
        lab.end_all()


def test_the_loss_continues_bit_for_bit(slurm_lab: SlurmLab) -> None:
    """A supervised run has no rollouts, whose order is a matter of timing."""
    recipe = str(ROOT / "docs/examples/conversations/recipe.yaml")
    settings = ("sft.epochs=null", "trainer.steps=60", "trainer.optimizer.warmup_steps=2", "checkpoint.every_steps=5")
    settings += ("trainer.nodes=2", "trainer.ranks=2", f"model.path={slurm_lab.model}")

    def submit(name: str, *more: str) -> RunDir:
        sets = [part for setting in (*settings, *more) for part in ("--set", setting)]
        slurm_lab.hpcrl("sft", recipe, "--cluster", str(slurm_lab.profile), "--name", name, *sets)
        return RunDir(slurm_lab.runs_root / name)

    whole, broken = submit("whole"), submit("broken", "job.spare_nodes={trainer: 1}")
    wait_saved(broken, 10)
    node = nodes_of(running(broken, attempt=1), "trainer")[1]
    slurm_lab.cluster.kill_node(node)
    try:
        slurm_lab.wait_state(broken, ["COMPLETED"], 240)
    finally:
        slurm_lab.cluster.revive_node(node)
    slurm_lab.wait_state(whole, ["COMPLETED"], 240)
    assert broken.attempts() == [1, 2]
    assert restarts(slurm_lab, broken) == {"0"}
    losses = [{record.step: record.loss for record in read_metrics(run)} for run in (whole, broken)]
    assert list(losses[0]) == list(range(1, 61))
    assert losses[0] == losses[1]


def test_no_step_is_lost_with_the_node_of_an_engine(slurm_lab: SlurmLab) -> None:
    settings = ("trainer.steps=40", "checkpoint.every_steps=0", "job.layout=hetjob", "job.spare_nodes={engine: 1}")
    run = slurm_lab.submit("saved", *settings)
    wait_step(run, 6)
    node = nodes_of(running(run, attempt=1), "engine")[0]
    slurm_lab.cluster.kill_node(node)
    try:
        after = running(run, attempt=2)
        slurm_lab.wait_state(run, ["COMPLETED"], 240)
    finally:
        slurm_lab.cluster.revive_node(node)
    assert node not in nodes_of(after, "engine")
    assert restarts(slurm_lab, run) == {"0"}
    (saved,), (restored,) = events(run, "supervisor.saved"), events(run, "trainer.restored")
    assert saved.data["step"] == restored.data["step"] >= 6
    slurm_lab.hpcrl("rollouts", "verify", run.name)


def test_engines_move_to_the_spare_node_and_then_the_run_is_requeued(probe_lab: SlurmLab) -> None:
    run = probe_lab.submit("spared", *PROBES, "job.layout=hetjob", SPARES, small=False)
    first = running(run, attempt=1)
    spare = first.spare_nodes[1]
    lost = nodes_of(first, "engine")[0]
    killed = [lost]
    probe_lab.cluster.kill_node(lost)
    try:
        second = running(run, attempt=2)
        assert nodes_of(second, "engine") == sorted({*nodes_of(first, "engine"), spare} - {lost})
        assert nodes_of(second, "trainer") == nodes_of(first, "trainer")
        assert second.spare_nodes == first.spare_nodes[:1]
        assert restarts(probe_lab, run) == {"0"}
        text = probe_lab.hpcrl("status", run.name).stdout
        assert f"spare nodes {first.spare_nodes[0]}   lost {lost}: the node went down" in text
        # none is left for engines: the next loss is what it is without spare nodes
        killed.append(nodes_of(second, "engine")[0])
        probe_lab.cluster.kill_node(killed[1])
        third = running(run, attempt=3)
    finally:
        for node in killed:
            probe_lab.cluster.revive_node(node)
    assert restarts(probe_lab, run) == {"1"}
    assert not {name for c in third.components for name in c.nodes} & set(killed)
    assert len(third.spare_nodes) + len(third.lost_nodes) == 2


@pytest.mark.parametrize("layout", ["hetjob", "single"])
def test_a_job_that_lost_its_supervisor_is_requeued(probe_lab: SlurmLab, layout: str) -> None:
    run = probe_lab.submit("headless", *PROBES, f"job.layout={layout}", SPARES, small=False)
    first = running(run, attempt=1)
    node = nodes_of(first, "trainer")[0]
    probe_lab.cluster.kill_node(node)
    try:
        second = running(run, attempt=2, timeout_s=180.0)
    finally:
        probe_lab.cluster.revive_node(node)
    assert restarts(probe_lab, run) == {"1"}
    assert node not in {name for c in second.components for name in c.nodes}
    assert f"node {node} went down" in probe_lab.json("why", run.name)["earlier"]["1"]


def test_an_idle_spare_node_that_is_lost_ends_nothing(probe_lab: SlurmLab) -> None:
    run = probe_lab.submit("idle", *PROBES, "job.layout=single", SPARES, small=False)
    first = running(run, attempt=1)
    idle, used = first.spare_nodes[0], nodes_of(first, "engine")[1]
    probe_lab.cluster.kill_node(idle)
    try:

        def has() -> list[str]:
            return expand_hostlist(probe_lab.client().details(job_id(run))[0]["NodeList"])

        wait_for(lambda: idle not in has(), 30.0, "Slurm to take the node out of the job")
        assert running(run, attempt=1).state is RunState.RUNNING
        probe_lab.cluster.kill_node(used)
        second = running(run, attempt=2)
    finally:
        for node in (idle, used):
            probe_lab.cluster.revive_node(node)
    assert restarts(probe_lab, run) == {"0"}
    assert set(second.lost_nodes) == {idle, used}
    assert not {name for c in second.components for name in c.nodes} & {idle, used}
