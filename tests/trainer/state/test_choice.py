"""Which checkpoint ranks restore: the newest good one, all of them the same, within one time for all that are tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import xxhash

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.errors import DeadlineError
from hpcrl.storage.files import FileRecord
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.state import restore
from hpcrl.trainer.state.restore import choose_checkpoint

CONTENT = b"the weights"


class TwoRanks:
    """Stands in for `Ranks` of two processes, of which this one is ``rank``: it does the work of both."""

    size = 2

    def __init__(self) -> None:
        self.rank = 0
        self.said: list[str] = []

    def on_leader(self, action: Callable[[], Any], what: str) -> Any:
        return action()

    def all_succeed(self, action: Callable[[], Any], what: str) -> list[Any]:
        self.said.append(what)
        found = []
        for rank in range(self.size):
            self.rank = rank
            found.append(action())
        return found


@pytest.fixture
def ledger(tmp_path: Path) -> CheckpointLedger:
    writer = CheckpointWriter.claim(tmp_path / "checkpoints", 1)
    for step in (2, 4, 6):
        files = {}
        for name in ("trainer/0.distcp", "trainer/1.distcp"):
            files[name] = FileRecord(len(CONTENT), xxhash.xxh3_128_hexdigest(CONTENT))
        for name in files:
            path = writer.staged(step) if writer.staged(step).exists() else writer.stage(step)
            (path / name).write_bytes(CONTENT)
        writer.commit(step=step, world_size=2, files=files, orchestrator_state=b"o", started_at_s=0.0)
    return writer.ledger


def damage(ledger: CheckpointLedger, step: int, name: str = "trainer/0.distcp") -> None:
    (ledger.path_of(step) / name).write_bytes(CONTENT[::-1])


def choose(ledger: CheckpointLedger, *, content: bool = True, timeout_s: float = 1000.0, **how: Any) -> RestoreDecision:
    return choose_checkpoint(ledger, cast(Ranks, TwoRanks()), content=content, timeout_s=timeout_s, **how)


def test_the_newest_good_one_is_chosen(ledger: CheckpointLedger) -> None:
    decision = choose(ledger)
    assert (decision.step, decision.verified, decision.skipped) == (6, "content", [])


@pytest.mark.parametrize("name", ["trainer/0.distcp", "trainer/1.distcp", "orchestrator.msgpack"])
def test_what_any_rank_finds_damaged_is_passed_over_by_all(ledger: CheckpointLedger, name: str) -> None:
    damage(ledger, 6, name)
    decision = choose(ledger)
    assert decision.step == 4
    ((skipped),) = decision.skipped
    assert skipped.step == 6
    assert skipped.reason.startswith(f"{ledger.path_of(6)} is damaged: {name} ")


def test_all_that_is_damaged_is_named_newest_first(ledger: CheckpointLedger) -> None:
    damage(ledger, 4)
    damage(ledger, 6)
    damage(ledger, 6, "trainer/1.distcp")
    decision = choose(ledger)
    assert (decision.step, [skipped.step for skipped in decision.skipped]) == (2, [6, 4])
    first, second = decision.skipped[0].reason.removeprefix(f"{ledger.path_of(6)} is damaged: ").split("; ")
    assert (first[:16], second[:16]) == ("trainer/0.distcp", "trainer/1.distcp")


def test_where_none_is_good_none_is_chosen(ledger: CheckpointLedger) -> None:
    for step in (2, 4, 6):
        damage(ledger, step)
    decision = choose(ledger)
    assert (decision.step, [skipped.step for skipped in decision.skipped]) == (None, [6, 4, 2])
    assert choose(CheckpointLedger(ledger.root / "none")).step is None


def test_sizes_alone_say_less(ledger: CheckpointLedger) -> None:
    damage(ledger, 6)
    decision = choose(ledger, content=False)
    assert (decision.step, decision.verified, decision.skipped) == (6, "sizes", [])
    (ledger.path_of(6) / "trainer" / "0.distcp").write_bytes(CONTENT[:-1])
    assert choose(ledger, content=False).step == 4


def test_a_manifest_that_cannot_be_read_is_damage(ledger: CheckpointLedger) -> None:
    (ledger.path_of(6) / "manifest.json").write_text("torn")
    decision = choose(ledger)
    assert decision.step == 4
    # once, though both ranks say so
    assert decision.skipped[0].reason.count("cannot be read") == 1


def test_one_that_goes_while_it_is_checked_is_not_damage(
    ledger: CheckpointLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = restore.damaged_files

    def and_it_goes(directory: Path, *arguments: Any, **how: Any) -> list[str]:
        if directory.name == "step-000006" and directory.exists():
            ledger.remove(6)
        return real(directory, *arguments, **how)

    monkeypatch.setattr(restore, "damaged_files", and_it_goes)
    decision = choose(ledger)
    assert (decision.step, decision.skipped) == (4, [])


def test_the_one_that_a_person_names_is_chosen_or_none(ledger: CheckpointLedger) -> None:
    decision = choose(ledger, only=ledger.path_of(4))
    assert (decision.step, decision.skipped) == (4, [])
    damage(ledger, 4)
    decision = choose(ledger, only=ledger.path_of(4))
    assert (decision.step, [skipped.step for skipped in decision.skipped]) == (None, [4])
    # also where it lies beside the ledger
    aside = ledger.root / "put-aside" / "step-000006"
    aside.parent.mkdir()
    ledger.path_of(6).rename(aside)
    assert choose(ledger, only=aside).step == 6
    (aside / "trainer" / "0.distcp").unlink()
    assert [skipped.step for skipped in choose(ledger, only=aside).skipped] == [6]


class Clock:
    """In place of the module `time`."""

    now = 500.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("each_s", "given"), [(20.0, [100.0, 60.0, 20.0]), (60.0, [100.0, 0.0, 0.0])])
def test_one_time_is_for_all_that_are_tried(
    ledger: CheckpointLedger, monkeypatch: pytest.MonkeyPatch, each_s: float, given: list[float]
) -> None:
    """Two ranks take turns here, so each entry takes twice as long; both are given the same time."""
    clock, asked = Clock(), list[float]()

    def slow(*_: Any, deadline_s: float, **how: Any) -> list[str]:
        asked.append(deadline_s)
        clock.now += each_s
        return ["it is damaged"]

    monkeypatch.setattr(restore, "time", clock)
    monkeypatch.setattr(restore, "damaged_files", slow)
    decision = choose(ledger, timeout_s=100.0)
    assert asked == [seconds for seconds in given for _ in range(2)]
    assert decision.seconds == 6 * each_s


def test_the_time_that_a_good_one_took_is_reported(ledger: CheckpointLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def slow(*_: Any, **how: Any) -> list[str]:
        clock.now += 7.0
        return []

    monkeypatch.setattr(restore, "time", clock)
    monkeypatch.setattr(restore, "damaged_files", slow)
    assert choose(ledger).seconds == 14.0


def test_too_late_is_an_error_and_no_answer(ledger: CheckpointLedger) -> None:
    with pytest.raises(DeadlineError):
        choose(ledger, timeout_s=0.0)
