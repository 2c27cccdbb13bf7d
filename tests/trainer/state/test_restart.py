"""What becomes of the other checkpoints where a person asks a run to go on from one of them, or from none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import xxhash

from hpcrl.checkpoints.checks import read_check
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.checkpoints.writer import CheckpointWriter
from hpcrl.config.recipe import CheckpointConfig
from hpcrl.errors import NothingToRestoreError
from hpcrl.runs.resume_request import ResumeRequest
from hpcrl.runs.role import RoleContext, restore_path
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import FileRecord
from hpcrl.storage.quarantine import list_asides
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.state.restart import choose_restored_checkpoint

CONTENT = b"the weights"


class OneRank:
    """Stands in for `Ranks` of one process."""

    rank, size = 0, 1

    def on_leader(self, action: Callable[[], Any], what: str) -> Any:
        return action()

    def all_succeed(self, action: Callable[[], Any], what: str) -> list[Any]:
        return [action()]


class Scene:
    """A run without a trainer; events are kept, by name."""

    def __init__(self, root: Path) -> None:
        self.run = RunDir(root / "run")
        self.run.path.mkdir()
        self.writer = self._next_attempt()
        self.events: dict[str, dict[str, object]] = {}

    def _next_attempt(self) -> CheckpointWriter:
        self.attempt = self.run.start_attempt()
        return CheckpointWriter.claim(self.run.checkpoints_dir, self.attempt)

    def save(self, *steps: int) -> None:
        for step in steps:
            (self.writer.stage(step) / "trainer" / "0.distcp").write_bytes(CONTENT)
            files = {"trainer/0.distcp": FileRecord(len(CONTENT), xxhash.xxh3_128_hexdigest(CONTENT))}
            self.writer.commit(step=step, world_size=1, files=files, orchestrator_state=b"", started_at_s=time.time())

    def ask(self, begin: str, step: int | None = None) -> None:
        request = ResumeRequest(begin=cast(Any, begin), step=step, after_attempt=self.attempt, time_s=0.0, by="test")
        request.write(self.run)

    def begin(self) -> RestoreDecision:
        """Decide as the next attempt does; the decision is the one on record."""
        self.writer, self.events = self._next_attempt(), {}
        context = RoleContext(self.run, attempt=self.attempt, role="trainer", replica=0, rank=0)
        ranks = cast(Ranks, OneRank())
        config = CheckpointConfig(verify="content")
        decision = choose_restored_checkpoint(
            context, self.writer, ranks, config, lambda kind, **data: self.events.update({kind: data})
        )
        assert decision == self.recorded()
        return decision

    def recorded(self) -> RestoreDecision | None:
        return RestoreDecision.find(restore_path(self.run, self.attempt))

    def kept(self) -> tuple[Sequence[int], list[int]]:
        """Steps in the ledger, and those that were put aside."""
        asides = list_asides(self.run.checkpoints_dir, "step-")
        return self.writer.ledger.steps(), sorted(aside.number for aside in asides)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_without_a_wish_the_newest_is_restored_and_all_stay(scene: Scene) -> None:
    assert scene.begin().step is None  # a run that has saved nothing begins
    scene.save(2, 4)
    decision = scene.begin()
    assert (decision.step, decision.saved_by, decision.asked, decision.put_aside) == (4, 2, "", [])
    assert (scene.kept(), scene.events) == (([2, 4], []), {})
    check = read_check(scene.writer.ledger, 4)
    assert check is not None
    assert (check.by, check.problem) == ("attempt 3", "")


def test_a_step_that_a_person_names_puts_later_ones_aside_and_comes_back_from_there(scene: Scene) -> None:
    scene.save(2, 4, 6)
    scene.ask("step", 4)
    decision = scene.begin()
    assert (decision.step, decision.saved_by, decision.asked, decision.put_aside) == (4, 1, "--from-step 4", [6])
    assert scene.kept() == ([2, 4], [6])
    assert scene.events == {"trainer.checkpoints_put_aside": {"steps": [6], "asked": "--from-step 4"}}
    # nothing was saved since then: the wish still holds, and there is nothing more to put aside
    assert (scene.begin().put_aside, scene.events) == ([], {})
    scene.ask("step", 6)
    decision = scene.begin()
    assert (decision.step, decision.put_aside) == (6, [])
    assert scene.kept() == ([2, 4, 6], [])


def test_from_scratch_puts_all_aside(scene: Scene) -> None:
    scene.save(2, 4)
    scene.ask("scratch")
    decision = scene.begin()
    assert (decision.step, decision.saved_by, decision.refused) == (None, None, "")
    assert (decision.asked, decision.put_aside) == ("--from-scratch", [2, 4])
    assert scene.kept() == ([], [2, 4])
    scene.save(2)  # the wish was fulfilled
    assert scene.begin().step == 2


def test_a_damaged_entry_is_passed_over_unless_a_person_names_it(scene: Scene) -> None:
    scene.save(2, 4)
    damaged = scene.writer.ledger.path_of(4) / "trainer" / "0.distcp"
    damaged.write_bytes(CONTENT[::-1])
    decision = scene.begin()
    assert (decision.step, [skipped.step for skipped in decision.skipped]) == (2, [4])
    assert scene.events == {"trainer.checkpoint_skipped": {"step": 4, "reason": decision.skipped[0].reason}}
    check = read_check(scene.writer.ledger, 4)
    assert check is not None
    assert check.problem == decision.skipped[0].reason
    scene.ask("step", 4)
    with pytest.raises(NothingToRestoreError, match="checkpoint of step 4 cannot be restored") as error:
        scene.begin()
    recorded = scene.recorded()
    assert recorded is not None
    assert (recorded.step, recorded.refused, recorded.put_aside) == (None, str(error.value), [])
    assert scene.kept() == ([2, 4], [])
