"""What follows the loss of a node in a job with spare ones: the next attempt in the same job, or a requeue."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from supervisor_testing import create

from hpcrl.checkpoints.history import add_saved
from hpcrl.config.layout import AttemptPolicy, JobComponent, Layout
from hpcrl.reporting import reports
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import read_events
from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.job_nodes import DID_NOT_ANSWER, WENT_DOWN, JobNodes
from hpcrl.supervisor.attempt.attempt_state import AttemptState
from hpcrl.supervisor.launch.replica_launcher import LocalLauncher
from hpcrl.supervisor.recovery.node_faults import NodeFaults
from hpcrl.supervisor.status.status_writer import StatusWriter


def silent(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
    return CommandResult(1, "", "Unable to contact slurm controller (connect failure)")


class SparedNodes(LocalLauncher):
    """A launcher in a job of two nodes and a spare one, of which a test decides what is down or silent."""

    def __init__(self, plan: Any, spares: int) -> None:
        component = JobComponent(
            roles=("trainer",),
            nodes=2,
            spares=spares,
            partition="p",
            gpus_per_node=0,
            gres="none",
            exclusive=True,
            cpus=1,
            memory_gib=1.0,
        )
        plan = plan.model_copy(update={"layout": Layout(kind="single", components=(component,))})
        environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"n[1-{2 + spares}]"}
        self.nodes = JobNodes(plan, environ, SlurmClient(run=silent))  # type: ignore[assignment]
        self.down: list[str] = []
        self.silent: list[str] = []
        self.told = self.asked = 0
        self.words: tuple[CauseKind, str] | None = None

    def failed_nodes(self, among: Collection[str] | None = None) -> list[str]:
        return self.down

    def silent_nodes(self) -> list[str]:
        self.asked += 1
        return self.silent

    def stay_away(self, run: object) -> None:
        self.told += 1

    def taken(self) -> tuple[CauseKind, str] | None:
        return self.words


class SparedAttempt:
    """An attempt in such a job, from the first sign to its last state."""

    def __init__(self, root: Path, *, spares: int = 1, **policy: object) -> None:
        values = {"requeue": True, "max_attempts": 9, "exclude_s": 600.0, "retries": 1, **policy}
        self.run = create(root, attempts=AttemptPolicy(**values))  # type: ignore[arg-type]
        self.steps = SparedNodes(self.run.plan(), spares)
        self.begin()

    def begin(self) -> None:
        self.attempt = self.run.start_attempt()
        self.board = StatusWriter(self.run, run_id="r", attempt=self.attempt)
        plan = self.run.plan()
        self.faults = NodeFaults(self.run, attempt=self.attempt, plan=plan, launcher=self.steps, board=self.board)
        self.state = AttemptState(self.board)

    async def end(self, kind: CauseKind, *, broken: Mapping[str, str] | None = None, killed: bool = False) -> bool:
        """Whether the next attempt begins in the same job."""
        seen = Cause(kind=kind, time_s=7.0, message="trainer 0 was lost", role="trainer")
        if killed:
            assert self.state.cancel(killed_within_s=30.0)
        self.state.fail(seen)
        self.state.add_node_faults(broken or {})
        self.state.stop(seen)
        self.cause, moves = await self.faults.judge(seen, broken or {}, began_at=None)
        self.state.moves |= moves
        self.state.replaced = self.faults.replace()
        return self.state.conclude(self.cause, retries=lambda _: False)

    def events(self, kind: str) -> list[Mapping[str, Any]]:
        assert reports.flush(30.0, directory=self.run.path)
        return [event.data for event in read_events(self.run, kind=kind)]


@pytest.fixture
def spared(tmp_path: Path) -> Iterator[SparedAttempt]:
    spared = SparedAttempt(tmp_path)
    yield spared
    spared.board.close()


async def test_a_node_that_went_down_is_replaced_in_the_job(spared: SparedAttempt) -> None:
    spared.steps.down = ["n2"]
    assert await spared.end(CauseKind.GUARD_LOST)
    assert spared.cause.kind is CauseKind.NODE_FAIL
    assert spared.state.state is RunState.FAILED  # of the attempt, in an event; the run continues
    (event,) = spared.events("nodes.replaced")
    assert (event["nodes"], event["spares"]) == ({"n2": WENT_DOWN}, [])
    assert event["cause"].startswith("node n2 went down; trainer 0 was lost")
    assert spared.steps.nodes.allocations()[0, 0].hosts == ("n1", "n3")
    assert [entry.node for entry in read_exclusions(spared.run, now_s=time.time())] == ["n2"]
    # Slurm takes a list of excluded nodes for waiting jobs only, and this one goes on
    assert spared.steps.told == 0
    # the next attempt does not record it once more
    spared.begin()
    spared.faults.placed()
    assert len(spared.events("nodes.excluded")) == 1


async def test_without_a_spare_node_the_run_is_requeued(spared: SparedAttempt) -> None:
    spared.steps.nodes.lose({"n3": "gone"})
    spared.steps.down = ["n2"]
    assert not await spared.end(CauseKind.GUARD_LOST)
    assert spared.state.state is RunState.REQUEUED
    assert spared.events("nodes.replaced") == []


async def test_two_nodes_at_once_need_two_spare_ones(tmp_path: Path) -> None:
    for spares, replaced in ((1, False), (2, True)):
        spared = SparedAttempt(tmp_path / str(spares), spares=spares)
        spared.steps.down = ["n1", "n2"]
        assert await spared.end(CauseKind.GUARD_LOST) is replaced
        spared.board.close()


async def test_a_run_that_is_not_requeued_uses_its_spare_nodes_and_then_fails(tmp_path: Path) -> None:
    spared = SparedAttempt(tmp_path, requeue=False, retries=0)
    spared.steps.down = ["n1"]
    assert await spared.end(CauseKind.GUARD_LOST)
    spared.begin()
    spared.steps.down = ["n2"]
    assert not await spared.end(CauseKind.GUARD_LOST)
    assert spared.state.state is RunState.FAILED
    spared.board.close()


async def test_a_job_that_slurm_ends_is_not_continued(spared: SparedAttempt) -> None:
    spared.steps.down = ["n2"]
    assert not await spared.end(CauseKind.GUARD_LOST, killed=True)
    assert spared.state.state is RunState.REQUEUED


async def test_a_node_that_slurm_does_not_call_down_yet_is_asked(spared: SparedAttempt) -> None:
    spared.steps.silent = ["n1"]
    assert await spared.end(CauseKind.GUARD_LOST)
    assert spared.cause.message == "node n1 did not answer; trainer 0 was lost"
    assert spared.steps.nodes.lost == {"n1": DID_NOT_ANSWER}


@pytest.mark.parametrize("kind", [CauseKind.ERROR, CauseKind.EXIT, CauseKind.HUNG])
async def test_a_failure_that_a_role_reported_asks_no_node(spared: SparedAttempt, kind: CauseKind) -> None:
    spared.steps.silent = ["n1"]
    assert not await spared.end(kind)
    assert (spared.steps.asked, spared.steps.nodes.lost) == (0, {})


async def test_where_all_nodes_are_silent_none_is_blamed(spared: SparedAttempt) -> None:
    spared.steps.silent = ["n1", "n2"]
    assert not await spared.end(CauseKind.GUARD_LOST)
    assert (spared.cause.kind, spared.steps.nodes.lost) == (CauseKind.GUARD_LOST, {})
    assert read_exclusions(spared.run, now_s=time.time()) == []


async def test_broken_hardware_is_left_by_a_run_that_made_progress(tmp_path: Path) -> None:
    for saved in (False, True):
        spared = SparedAttempt(tmp_path / str(saved))
        if saved:
            spared.run.checkpoints_dir.mkdir()
            add_saved(spared.run.checkpoints_dir, step=4, attempt=spared.attempt)
        assert await spared.end(CauseKind.EXIT, broken={"n2": "trainer 0: NVRM: Xid"}) is saved
        assert spared.steps.nodes.lost == ({"n2": "trainer 0: NVRM: Xid"} if saved else {})
        spared.board.close()


async def test_a_placement_without_enough_nodes_is_a_node_failure(spared: SparedAttempt) -> None:
    """Slurm may take out an idle spare node, which nobody notices until it is needed."""
    spared.steps.nodes.lose({"n2": "gone", "n3": "gone"})
    assert not await spared.end(CauseKind.SUPERVISOR_ERROR)
    assert (spared.cause.kind, spared.state.state) == (CauseKind.NODE_FAIL, RunState.REQUEUED)


async def test_nodes_found_lost_at_the_start_are_avoided_and_shown(spared: SparedAttempt) -> None:
    spared.steps.nodes.lose({"n1": DID_NOT_ANSWER})
    spared.faults.placed()
    assert [entry.node for entry in read_exclusions(spared.run, now_s=time.time())] == ["n1"]
    spared.board.write()
    assert reports.flush(30.0, directory=spared.run.path)
    status = RunStatus.read(spared.run)
    assert status is not None
    assert (status.spare_nodes, status.lost_nodes) == ([], {"n1": DID_NOT_ANSWER})
