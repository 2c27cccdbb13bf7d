"""Nodes that an attempt finds broken: who is asked, what is written down, and what follows for the run."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from supervisor_testing import create

from hpcrl.checkpoints.history import add_saved
from hpcrl.config.layout import AttemptPolicy
from hpcrl.config.plan import Plan
from hpcrl.reporting import reports
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import read_events
from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.supervisor.launch.replica_launcher import LocalLauncher
from hpcrl.supervisor.recovery.node_faults import NodeFaults
from hpcrl.supervisor.status.status_writer import StatusWriter


class Nodes(LocalLauncher):
    """A launcher on whose nodes a test decides what is down; None among the questions are those about our own job."""

    def __init__(self) -> None:
        self.down: dict[Collection[str] | None, list[str]] = {}
        self.asked: list[Collection[str] | None] = []
        self.told: list[RunDir] = []
        self.words: tuple[CauseKind, str] | None = None
        self.looks = 0

    def failed_nodes(self, among: Collection[str] | None = None) -> list[str]:
        self.asked.append(among)
        return self.down.get(among, [])

    def stay_away(self, run: RunDir) -> None:
        self.told.append(run)

    def taken(self) -> tuple[CauseKind, str] | None:
        self.looks += 1
        return self.words


class Scene:
    """An attempt whose launcher is `Nodes`."""

    def __init__(self, root: Path, **policy: object) -> None:
        values = {"requeue": True, "max_attempts": 3, "exclude_s": 600.0, "retries": 1, **policy}
        self.run = create(root, attempts=AttemptPolicy(**values))  # type: ignore[arg-type]
        self.attempt = self.run.start_attempt()
        self.board = StatusWriter(self.run, run_id="r", attempt=self.attempt)
        self.board.enter(RunState.STOPPING, cause())
        self.nodes = Nodes()
        self.plan: Plan = self.run.plan()
        self.faults = NodeFaults(self.run, attempt=self.attempt, plan=self.plan, launcher=self.nodes, board=self.board)

    def written(self) -> dict[str, str]:
        return {entry.node: entry.reason for entry in read_exclusions(self.run, now_s=time.time())}

    def events(self) -> list[Mapping[str, object]]:
        assert reports.flush(30.0, directory=self.run.path)
        return [event.data for event in read_events(self.run, kind="nodes.excluded")]

    def shown(self) -> Cause | None:
        """The cause that a reader of the status sees."""
        self.board.write()
        assert reports.flush(30.0, directory=self.run.path)
        status = RunStatus.read(self.run)
        assert status is not None
        return status.cause

    def saved(self) -> None:
        self.run.checkpoints_dir.mkdir()
        add_saved(self.run.checkpoints_dir, step=4, attempt=self.attempt)


def cause(kind: CauseKind = CauseKind.EXIT) -> Cause:
    return Cause(kind=kind, time_s=7.0, message="trainer 0 exited with code 1", role="trainer")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.board.close()


# -- what is written down


def test_a_node_is_written_down_once_with_its_first_reason(scene: Scene) -> None:
    before_s = time.time()
    scene.faults.write({"n1": "the node went down"})
    scene.faults.write({"n1": "ECC", "n2": "ECC"})
    scene.faults.write({"n2": "again"})
    assert scene.written() == {"n1": "the node went down", "n2": "ECC"}
    assert scene.events() == [{"nodes": {"n1": "the node went down"}}, {"nodes": {"n2": "ECC"}}]
    for entry in read_exclusions(scene.run, now_s=before_s):
        assert (entry.attempt, entry.until_s - entry.since_s) == (scene.attempt, 600.0)
        assert before_s <= entry.since_s <= time.time()


def test_where_no_node_is_avoided_none_is_written_down(tmp_path: Path) -> None:
    scene = Scene(tmp_path, exclude_s=0.0)
    scene.faults.write({"n1": "the node went down"})
    assert (scene.written(), scene.events()) == ({}, [])
    scene.board.close()


def test_nodes_that_cannot_be_recorded_are_recorded_later(scene: Scene) -> None:
    """No event names them before: the next attempt would not stay away from them."""
    unwritable = scene.run.path / "excluded_nodes.json"
    unwritable.mkdir()
    scene.faults.write({"n1": "the node went down"})
    scene.faults.write({"n1": "ECC", "n2": "ECC"})
    assert scene.events() == []
    unwritable.rmdir()
    scene.faults.write({})
    assert scene.written() == {"n1": "the node went down", "n2": "ECC"}
    assert scene.events() == [{"nodes": {"n1": "the node went down", "n2": "ECC"}}]
    scene.faults.write({"n1": "again"})
    assert len(scene.events()) == 1


# -- who is asked, and who is told


async def test_nodes_of_our_own_job_are_reported_to_slurm_once_each(scene: Scene) -> None:
    scene.nodes.down = {None: ["n2"]}
    assert await scene.faults.settle() == ["n2"]
    assert scene.nodes.told == [scene.run]
    assert await scene.faults.settle() == ["n2"]
    assert len(scene.nodes.told) == 1
    scene.nodes.down = {None: ["n1"]}
    assert await scene.faults.settle() == ["n1", "n2"]  # the second has come back, and was away all the same
    assert len(scene.nodes.told) == 2
    assert scene.written() == dict.fromkeys(["n1", "n2"], "the node went down")


async def test_nodes_of_another_job_of_the_run_are_avoided_and_end_nothing(scene: Scene) -> None:
    theirs = frozenset({"n8", "n9"})
    scene.nodes.down = {theirs: ["n9"]}
    scene.faults.suspect(theirs)
    assert await scene.faults.settle() == []
    assert scene.nodes.asked == [theirs, None]
    assert (scene.written(), scene.nodes.told) == ({"n9": "the node went down"}, [])
    assert await scene.faults.judge(cause(), {}, began_at=None) == (cause(), False)


@pytest.mark.parametrize("policy", [{"requeue": False, "retries": 0}, {"exclude_s": 0.0}])
async def test_nodes_are_reported_to_slurm_only_if_the_job_comes_back(
    tmp_path: Path, policy: dict[str, object]
) -> None:
    scene = Scene(tmp_path, **policy)
    scene.nodes.down = {None: ["n2"]}
    assert await scene.faults.settle() == ["n2"]
    assert scene.nodes.told == []
    scene.board.close()


# -- what ended the attempt, and what follows


@pytest.mark.parametrize(
    ("down", "kind", "message"),
    [
        (["n2"], CauseKind.EXIT, "node n2 went down; trainer 0 exited with code 1"),
        (["n2", "n1"], CauseKind.EXIT, "nodes n1, n2 went down; trainer 0 exited with code 1"),
        (["n2"], CauseKind.CANCELLED, "node n2 went down"),
    ],
)
@pytest.mark.parametrize("requeue", [True, False])
async def test_a_node_that_went_down_is_the_cause_of_what_followed(
    tmp_path: Path, down: list[str], kind: CauseKind, message: str, requeue: bool
) -> None:
    scene = Scene(tmp_path, requeue=requeue)
    scene.nodes.down = {None: down}
    found, moves = await scene.faults.judge(cause(kind), {}, began_at=None)
    assert found == Cause(kind=CauseKind.NODE_FAIL, time_s=7.0, message=message)
    assert moves is requeue
    assert scene.nodes.looks == 0  # who took the nodes is not asked where one of them was lost
    scene.board.close()


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({}, True),
        ({"broken": {}}, False),
        ({"requeue": False}, False),
        ({"saved": False}, False),
        ({"kind": CauseKind.ROLLOUTS_FAILED}, False),
    ],
)
async def test_a_failure_on_broken_hardware_moves_a_run_that_has_worked(
    tmp_path: Path, changes: dict[str, Any], moves: bool
) -> None:
    case = {"broken": {"n1": "ECC"}, "requeue": True, "saved": True, "kind": CauseKind.EXIT, **changes}
    scene = Scene(tmp_path, requeue=case["requeue"])
    if case["saved"]:
        scene.saved()
    failed = cause(case["kind"])
    assert await scene.faults.judge(failed, case["broken"], began_at=4) == (failed, moves)
    assert scene.written() == case["broken"]
    scene.board.close()


async def test_who_came_no_further_than_its_checkpoint_does_not_move(scene: Scene) -> None:
    """One that another attempt has left does not count as progress of this one."""
    (scene.run.checkpoints_dir / "step-000004").mkdir(parents=True)
    assert await scene.faults.judge(cause(), {"n1": "ECC"}, began_at=4) == (cause(), False)
    assert await scene.faults.judge(cause(), {"n1": "ECC"}, began_at=3) == (cause(), True)


@pytest.mark.parametrize("kind", [CauseKind.CANCELLED, CauseKind.GUARD_LOST, CauseKind.NO_STEP])
@pytest.mark.parametrize(("words", "requeue"), [(CauseKind.PREEMPTED, True), (CauseKind.CANCELLED, False)])
async def test_an_end_that_slurm_brought_is_in_its_words(
    scene: Scene, kind: CauseKind, words: CauseKind, requeue: bool
) -> None:
    scene.nodes.words = words, "job 7 was taken"
    scene.saved()
    scene.faults.investigate(cause(kind))
    told = Cause(kind=words, time_s=7.0, message="job 7 was taken: trainer 0 exited with code 1")
    assert await scene.faults.judge(cause(kind), {}, began_at=None) == (told, requeue)
    assert scene.nodes.looks == 1
    assert scene.shown() == told


async def test_who_was_not_investigated_is_asked_about_in_the_end(scene: Scene) -> None:
    scene.nodes.words = CauseKind.PREEMPTED, "job 7 was taken"
    found, moves = await scene.faults.judge(cause(CauseKind.GUARD_LOST), {}, began_at=None)
    assert (found.kind, moves, scene.nodes.looks) == (CauseKind.PREEMPTED, True, 1)


async def test_slurm_is_not_asked_about_a_failure_that_a_role_reported(scene: Scene) -> None:
    """Slurm may take the nodes at the same time; what went wrong before stays the cause."""
    scene.nodes.words = CauseKind.PREEMPTED, "job 7 was taken"
    scene.faults.investigate(cause())
    assert await scene.faults.judge(cause(), {}, began_at=None) == (cause(), False)
    assert scene.nodes.looks == 0


async def test_where_slurm_took_nothing_the_cause_stays(scene: Scene) -> None:
    lost = cause(CauseKind.GUARD_LOST)
    scene.faults.investigate(lost)
    assert await scene.faults.judge(lost, {}, began_at=None) == (lost, False)
    assert (scene.nodes.looks, scene.shown()) == (1, cause())
