"""What is kept, why, and what a person can do about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ledger_testing import save_as

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.checkpoints.checks import read_check, record_check
from hpcrl.checkpoints.pins import pin, pins_of
from hpcrl.checkpoints.retention import removable_steps
from hpcrl.checkpoints.verify import share_of
from hpcrl.errors import CheckpointError
from hpcrl.storage.files import FileRecord
from hpcrl.storage.pins import Pin


@pytest.fixture
def writer(tmp_path: Path) -> CheckpointWriter:
    writer = CheckpointWriter.claim(tmp_path, 1)
    for step in (1, 2, 3, 4, 5, 6):
        save_as(writer, step)
    return writer


def test_rule() -> None:
    steps = [5, 10, 15, 20, 25]
    assert removable_steps(steps, whole=steps, pinned=(), keep_last=2) == [5, 10, 15]
    assert removable_steps(steps, whole=steps, pinned=(), keep_last=2, keep_every=10) == [5, 15]
    assert removable_steps(steps, whole=steps, pinned=(5,), keep_last=1, keep_every=10) == [15]
    # damaged ones do not push good ones out, and go when they are older than all that is kept
    assert removable_steps(steps, whole=[5, 10, 15], pinned=(), keep_last=2) == [5]
    assert removable_steps(steps, whole=[20, 25], pinned=(), keep_last=2) == [5, 10, 15]
    assert removable_steps(steps, whole=[], pinned=(), keep_last=2) == []


def test_retain(writer: CheckpointWriter) -> None:
    pin(writer.ledger, 1, reason="paper", by="ann")
    assert writer.retain(keep_last=2, keep_every=3) == [2, 4]
    assert writer.ledger.steps() == [1, 3, 5, 6]
    (writer.ledger.path_of(6) / "trainer" / "0.distcp").unlink()
    assert writer.retain(keep_last=1) == [3]
    assert writer.ledger.steps() == [1, 5, 6]
    assert os.listdir(writer.fence.path) == []


def test_an_entry_is_removed_with_all_its_files(writer: CheckpointWriter) -> None:
    for step in (1, 6):
        record_check(writer.ledger, step, content=True, by="attempt 1")
    assert writer.retain(keep_last=1) == [1, 2, 3, 4, 5]
    left = sorted(path.name for path in writer.root.iterdir() if not path.name.startswith("."))
    assert left == ["history.jsonl", "step-000006", "step-000006.check.json"]
    assert read_check(writer.ledger, 6) is not None


def test_the_zeroth_entry_is_not_a_multiple_that_is_kept() -> None:
    assert removable_steps([0, 1, 2, 3], whole=[3], pinned=(), keep_last=1, keep_every=1) == [0]


def test_where_none_of_the_last_is_kept_nothing_goes() -> None:
    assert removable_steps([1, 2, 3], whole=[1, 2, 3], pinned=(), keep_last=0) == []


def test_the_bound_of_what_goes_is_the_oldest_of_the_last_whole_ones() -> None:
    # in any order, as a set has them
    assert removable_steps([4, 1, 3, 2], whole=[3, 1, 4], pinned=(), keep_last=2) == [1, 2]


def test_a_rule_of_multiples_of_two_keeps_every_second(writer: CheckpointWriter) -> None:
    assert writer.retain(keep_last=1, keep_every=2) == [1, 3, 5]
    assert writer.retain(keep_last=1, keep_every=4) == [2]
    assert writer.retain(keep_last=1) == [4]


def test_what_was_put_aside_goes_when_it_is_passed_and_unpinned(writer: CheckpointWriter) -> None:
    pin(writer.ledger, 4, reason="paper", by="ann")
    assert sorted(writer.put_aside_after(2)) == [3, 4, 5, 6]
    assert writer.ledger.steps() == [1, 2]
    assert sorted(writer.collect_aside(5)) == [3, 5]
    assert sorted(path.name for path in writer.root.glob("put-aside/*/*")) == ["step-000004", "step-000006"]


def test_pins(writer: CheckpointWriter) -> None:
    ledger = writer.ledger
    pin(ledger, 2, reason="best so far", by="ann")
    assert [(p.number, p.reason, p.by) for p in pins_of(ledger.root).all().values()] == [(2, "best so far", "ann")]
    assert pins_of(ledger.root).remove(2)
    assert not pins_of(ledger.root).remove(2)
    assert pins_of(ledger.root).all() == {}
    with pytest.raises(CheckpointError, match="step-000009"):
        pin(ledger, 9, reason="", by="ann")
    # a pin that cannot be read protects all the same
    pin(ledger, 3, reason="", by="ann")
    (ledger.root / "step-000003.pin.json").write_text("torn")
    assert writer.retain(keep_last=1) == [1, 2, 4, 5]
    assert "cannot be read" in pins_of(ledger.root).all()[3].reason


def test_a_pin_that_comes_while_an_entry_is_being_removed_saves_it(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide = type(writer.fence).hide

    def and_somebody_pins(fence: object, name: str) -> bool:
        (writer.root / f"{name}.pin.json").write_bytes(b"{}")
        return hide(writer.fence, name)

    monkeypatch.setattr("hpcrl.storage.fence.Fence.hide", and_somebody_pins)
    assert writer.retain(keep_last=1) == []
    assert writer.ledger.steps() == [1, 2, 3, 4, 5, 6]


def test_an_entry_that_another_removes_at_the_same_moment_is_not_counted(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide = type(writer.fence).hide

    def and_a_person_was_faster(fence: object, name: str) -> bool:
        if name == "step-000002":
            writer.ledger.remove(2)
        return hide(writer.fence, name)

    monkeypatch.setattr("hpcrl.storage.fence.Fence.hide", and_a_person_was_faster)
    assert writer.retain(keep_last=3) == [1, 3]
    assert writer.ledger.steps() == [4, 5, 6]


def test_a_pin_waits_for_an_entry_that_comes_back(writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who removes it brings it back when the pin is seen; meanwhile it is in no listing."""
    away = [True] * 4
    steps, pauses = CheckpointLedger.steps, []

    def listed(ledger: CheckpointLedger) -> list[int]:
        return [step for step in steps(ledger) if step != 2 or not (away and away.pop())]

    monkeypatch.setattr(CheckpointLedger, "steps", listed)
    monkeypatch.setattr("hpcrl.checkpoints.pins.time.sleep", pauses.append)
    assert pin(writer.ledger, 2, reason="best", by="ann").number == 2
    assert 2 in pins_of(writer.root).numbers()
    assert len(pauses) == 4
    # long enough for a rename on a shared filesystem to be seen
    assert 0.5 < sum(pauses) < 5.0


def test_pinning_what_goes_at_the_same_moment_says_so(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = CheckpointLedger(writer.root)
    monkeypatch.setattr("hpcrl.checkpoints.pins._LOOK_S", 0.0)

    def and_it_goes(path: Path, value: Pin) -> None:
        path.write_bytes(b"{}")
        ledger.remove(value.number)

    monkeypatch.setattr("hpcrl.storage.pins.write_json", and_it_goes)
    with pytest.raises(CheckpointError, match="removed while it was being pinned"):
        pin(ledger, 2, reason="", by="ann")
    assert pins_of(ledger.root).all() == {}


def test_an_entry_that_cannot_be_removed_is_a_warning(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("hpcrl.storage.fence.Fence.hide", refuse)
    assert writer.retain(keep_last=5) == []
    assert "step 1 cannot be removed" in caplog.text


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_share_the_reading(world_size: int) -> None:
    files = {f"{i}.distcp": FileRecord(100 + i, "") for i in range(7)} | {"small": FileRecord(1, "")}
    shares = [share_of(files, rank, world_size) for rank in range(world_size)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(record.bytes for record in share.values()) for share in shares]
    assert max(loads) <= sum(loads) / world_size + 106
