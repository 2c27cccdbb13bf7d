"""Nodes that go down under a run: the next attempt stays away from them, however fast they come back.

With the probe as payload: what Slurm and the supervisor do is the same, and the ranks are light.
"""

from __future__ import annotations

import time

import pytest
from patience import wait_for
from slurm_lab import PROBES, SlurmLab, job_id

from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, RunState, RunStatus

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(600)]


def submit(lab: SlurmLab, layout: str) -> tuple[RunDir, RunStatus]:
    run = lab.submit("holds", *PROBES, f"job.layout={layout}", small=False)
    return run, running(run, attempt=1)


def running(run: RunDir, *, attempt: int) -> RunStatus:
    """Wait until all replicas of an attempt are there."""

    def look() -> RunStatus | None:
        status = RunStatus.read(run)
        there = status is not None and status.attempt == attempt and status.state is RunState.RUNNING
        return status if there and all(c.state is ComponentState.READY for c in status.components) else None

    found = wait_for(look, 120.0, f"attempt {attempt}")
    assert isinstance(found, RunStatus)
    return found


def nodes_of(status: RunStatus, role: str) -> list[str]:
    return [node for c in status.components if c.role == role for node in c.nodes]


@pytest.mark.parametrize(
    ("layout", "role", "at_once"),
    [
        ("hetjob", "engine", False),  # the supervisor sees it, and tells Slurm while it dies
        ("single", "engine", True),  # the node is back before anybody has looked
        ("hetjob", "trainer", True),  # the supervisor dies with its node: the next attempt finds out
    ],
)
def test_the_next_attempt_stays_away(layout: str, role: str, at_once: bool, probe_lab: SlurmLab) -> None:
    run, before = submit(probe_lab, layout)
    node = nodes_of(before, role)[0]
    if role == "engine":  # once for each layout
        _shells_are_where_the_roles_are(probe_lab, run, before)
    probe_lab.cluster.kill_node(node)
    if at_once:
        probe_lab.cluster.revive_node(node)
    try:
        after = running(run, attempt=2)
    finally:
        probe_lab.cluster.revive_node(node)
    assert node not in {name for c in after.components for name in c.nodes}
    (entry,) = read_exclusions(run, now_s=time.time())
    assert (entry.node, entry.attempt) == (node, 1)
    assert entry.reason.startswith("the node went down")
    assert f"node {node} went down" in probe_lab.json("why", run.name)["earlier"]["1"]
    records = probe_lab.client().details(job_id(run))
    told = {record["ExcNodeList"] for record in records}
    # a job that began elsewhere by itself, because the node was still down, needs no list; and Slurm may begin before
    # all of its components have one
    if at_once:
        assert node in told, records


def _shells_are_where_the_roles_are(lab: SlurmLab, run: RunDir, status: RunStatus) -> None:
    said = "echo $HPCRL_ROLE $HPCRL_REPLICA $SLURMD_NODENAME $PROBE_HOLD_S; exit 6"
    for role, replica in (("engine", 1), ("trainer", 0), ("orchestrator", 0)):
        (component,) = [c for c in status.components if (c.role, c.replica) == (role, replica)]
        for node in component.nodes:
            command = ("shell", run.name, "--role", f"{role}/{replica}", "--node", node, "--", "sh", "-c", said)
            found = lab.hpcrl(*command, check=False)
            assert found.returncode == 6, found.stderr
            # a variable that the profile alone sets says whose environment it is
            assert found.stdout.split() == [role, str(replica), node, "600"]
    elsewhere = lab.hpcrl("shell", run.name, "--node", nodes_of(status, "trainer")[0], "--", "true", check=False)
    assert elsewhere.returncode == 2
    assert f"its nodes are {nodes_of(status, 'engine')[0]}" in elsewhere.stderr
