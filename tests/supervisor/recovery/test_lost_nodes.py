"""Which nodes the attempt before has lost, as far as Slurm's records show."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from supervisor_testing import create, make_plan, make_recipe

from hpcrl.checkpoints.history import add_saved
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.layout import AttemptPolicy
from hpcrl.config.load import load_cluster
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import read_events
from hpcrl.runs.exclusions import exclude, read_exclusions
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus, ProcessId, RunState, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.submit.submission import create_run
from hpcrl.supervisor.launch.replica_launcher import LocalLauncher
from hpcrl.supervisor.recovery.node_faults import NodeFaults
from hpcrl.supervisor.recovery.nodes import find_lost_nodes, may_ask, record_lost_nodes
from hpcrl.supervisor.status.status_writer import StatusWriter

BEGAN_S = 1000.0


def status(state: RunState = RunState.STOPPING) -> RunStatus:
    component = ComponentStatus(role="trainer", replica=0, state=ComponentState.READY, nodes=["n1", "n2"])
    me = ProcessId(host="n1", boot_id="b", pid=2, start_ticks=1)
    return RunStatus(
        run_id="r", attempt=1, state=state, supervisor=me, started_at_s=BEGAN_S, heartbeat_s=1.0, components=[component]
    )


def client(nodes: Sequence[str], job: str = "JobId=7", *, killed: int = 0) -> SlurmClient:
    """Slurm with these nodes; its first answers are lost to a SIGTERM."""
    left = [killed]

    def run(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        if left[0]:
            left[0] -= 1
            return CommandResult(-15, "", "")
        return CommandResult(0, "\n".join(nodes if "node" in argv else [job]) + "\n", "")

    return SlurmClient(run=run)


def node(name: str, state: str = "IDLE", since_s: int = 500) -> str:
    return f"NodeName={name} NodeAddr={name} State={state} SlurmdStartTime={since_s}"


@pytest.mark.parametrize(
    ("nodes", "job", "lost"),
    [
        ([node("n1"), node("n2")], "JobId=7", {}),
        ([node("n1", "DOWN*"), node("n2")], "JobId=7", {"n1": "the node went down"}),
        ([node("n1"), node("n2", since_s=1001)], "JobId=7", {"n2": "the node went down and came back"}),
        ([node("n1"), node("n2")], "JobId=7 FailedNode=n2", {"n2": "the node went down and came back"}),
        ([node("n3", "DOWN*"), node("n4", since_s=1001)], "JobId=7 FailedNode=n3", {}),  # of other jobs
    ],
)
def test_lost_nodes(nodes: list[str], job: str, lost: dict[str, str]) -> None:
    assert find_lost_nodes(status(), client(nodes, job), 7) == lost
    # one that failed, and that Slurm requeues nevertheless, may have seen only what followed
    assert find_lost_nodes(status(RunState.FAILED), client(nodes, job), 7) == lost


@pytest.mark.parametrize("state", [RunState.REQUEUED, RunState.CANCELLED])
def test_an_attempt_with_a_recorded_end_loses_no_more_nodes(state: RunState) -> None:
    assert find_lost_nodes(status(state), client([node("n1", "DOWN")]), 7) == {}


def test_a_question_that_slurms_sigterm_ended_is_asked_again() -> None:
    assert find_lost_nodes(status(), client([node("n1", "DOWN")], killed=1), 7) == {"n1": "the node went down"}


def on_slurm(root: Path, *, scontrol: bool = True, exclude_s: float = 600.0) -> RunDir:
    """A run of a site with Slurm."""
    cluster = load_cluster("devcluster").value
    assert isinstance(cluster, SlurmCluster)
    capabilities = cluster.capabilities.model_copy(update={"scontrol_on_nodes": scontrol})
    cluster = cluster.model_copy(update={"capabilities": capabilities})
    return create_run(make_recipe(), cluster, make_plan(root / "run", attempts=AttemptPolicy(exclude_s=exclude_s))).run


def test_slurm_is_asked_only_where_jobs_reach_it(tmp_path: Path) -> None:
    assert may_ask(on_slurm(tmp_path / "a"))
    assert not may_ask(on_slurm(tmp_path / "b", scontrol=False))
    assert not may_ask(create(tmp_path / "local"))


def test_lost_nodes_are_written_down_once_with_their_end(tmp_path: Path) -> None:
    """One that is on record since an earlier attempt begins anew; one of this attempt does not."""
    run, before_s = on_slurm(tmp_path), time.time()
    slurm = client([node("n1", "DOWN"), node("n2", "DOWN")])
    exclude(run, {"n1": "known"}, attempt=1, now_s=before_s - 100.0, seconds=1000.0)
    exclude(run, {"n2": "earlier"}, attempt=0, now_s=before_s - 100.0, seconds=1000.0)
    for _ in range(2):
        record_lost_nodes(run, run.plan(), status(), slurm, 7, writer="test")
    found = {entry.node: entry for entry in read_exclusions(run, now_s=time.time())}
    assert {name: (entry.reason, entry.attempt) for name, entry in found.items()} == {
        "n1": ("known", 1),
        "n2": ("the node went down", 1),
    }
    assert before_s <= found["n2"].since_s <= time.time()
    assert found["n2"].until_s == found["n2"].since_s + 600.0
    (event,) = read_events(run, kind="nodes.excluded")
    assert (event.attempt, event.writer, event.data) == (1, "test", {"nodes": {"n2": "the node went down"}})


@pytest.mark.parametrize("why_not", ["no attempt before", "no exclusions", "no scontrol"])
def test_nothing_is_recorded_without_permission_or_need(why_not: str, tmp_path: Path) -> None:
    exclude_s = 0.0 if why_not == "no exclusions" else 600.0
    run = on_slurm(tmp_path, scontrol=why_not != "no scontrol", exclude_s=exclude_s)
    before = None if why_not == "no attempt before" else status()
    record_lost_nodes(run, run.plan(), before, client([node("n1", "DOWN"), node("n2")]), 7, writer="test")
    assert not (run.path / "excluded_nodes.json").exists()
    assert list(read_events(run)) == []


class OneLook(LocalLauncher):
    """A launcher on whose nodes nothing is down any more; it counts what Slurm is told."""

    def __init__(self) -> None:
        self.told = 0

    def stay_away(self, run: RunDir) -> None:
        self.told += 1


@pytest.mark.parametrize("ours", [True, False])
async def test_a_node_that_one_look_found_down_stays_blamed_when_the_next_finds_it_back(
    ours: bool, tmp_path: Path
) -> None:
    run = create(tmp_path, attempts=AttemptPolicy(requeue=True, max_attempts=3, exclude_s=3600.0))
    launcher, board = OneLook(), StatusWriter(run, run_id="r", attempt=run.start_attempt())
    blame = NodeFaults(run, attempt=1, plan=run.plan(), launcher=launcher, board=board)
    lost = Cause(kind=CauseKind.NODE_FAIL, time_s=BEGAN_S, message="engine 0 was lost: node n3 went down")
    blame.saw(["n3"], ours=ours)
    blame.investigate(lost)
    cause, requeues = await blame.judge(lost, {}, began_at=None)
    assert [entry.node for entry in read_exclusions(run, now_s=time.time())] == ["n3"]
    if ours:
        assert (cause.kind, requeues, launcher.told) == (CauseKind.NODE_FAIL, True, 1)
        assert cause.message.startswith("node n3 went down")
    else:
        assert (cause, requeues, launcher.told) == (lost, False, 0)
    board.close()


def saved_by_attempt(run: RunDir, attempt: int) -> None:
    run.checkpoints_dir.mkdir()
    add_saved(run.checkpoints_dir, step=4, attempt=attempt)


@pytest.mark.parametrize(("saved", "requeue"), [(True, True), (False, True), (True, False)])
async def test_an_allocation_without_steps_is_changed_for_another_where_the_run_has_worked(
    saved: bool, requeue: bool, tmp_path: Path
) -> None:
    """Where nothing was ever saved, what the run asks Slurm for may be wrong: that is no better with other nodes."""
    run = create(tmp_path, attempts=AttemptPolicy(requeue=requeue, max_attempts=3))
    board = StatusWriter(run, run_id="r", attempt=run.start_attempt())
    if saved:
        saved_by_attempt(run, 1)
    faults = NodeFaults(run, attempt=2, plan=run.plan(), launcher=LocalLauncher(), board=board)
    refused = Cause(kind=CauseKind.NO_STEP, time_s=BEGAN_S, message="trainer 0 did not begin")
    assert await faults.judge(refused, {}, began_at=4) == (refused, saved and requeue)
    board.close()


class Cancelled(LocalLauncher):
    """Of a job that somebody has cancelled."""

    def taken(self) -> tuple[CauseKind, str] | None:
        return CauseKind.CANCELLED, "job 7 was ended by Slurm"


async def test_no_step_in_a_job_that_is_being_cancelled_is_its_cancel(tmp_path: Path) -> None:
    run = create(tmp_path, attempts=AttemptPolicy(requeue=True, max_attempts=3))
    board = StatusWriter(run, run_id="r", attempt=run.start_attempt())
    saved_by_attempt(run, 1)
    faults = NodeFaults(run, attempt=2, plan=run.plan(), launcher=Cancelled(), board=board)
    refused = Cause(kind=CauseKind.NO_STEP, time_s=BEGAN_S, message="trainer 0 did not begin")
    cause, moves = await faults.judge(refused, {}, began_at=4)
    assert (cause.kind, moves) == (CauseKind.CANCELLED, False)
    board.close()
