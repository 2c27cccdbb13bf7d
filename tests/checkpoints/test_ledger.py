"""The ledger: an entry is joint and whole, or it is no entry."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from hpcrl.checkpoints import CheckpointEntry, CheckpointLedger
from hpcrl.errors import CheckpointError


def save(ledger: CheckpointLedger, step: int, text: str = "weights", attempt: int = 1) -> CheckpointEntry:
    stage = ledger.stage(step, token=f"attempt-{attempt}")
    stage.create()
    (stage.path / "trainer").mkdir()
    (stage.path / "trainer" / "0.distcp").write_text(f"{text} {step}")
    return ledger.commit(
        stage,
        step=step,
        attempt=attempt,
        world_size=1,
        orchestrator_state=f"rollouts {step}".encode(),
        started_at_s=time.time(),
    )


def test_newest_good_entry_is_chosen(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path / "checkpoints")
    assert ledger.newest_verified() == (None, [])
    for step in (10, 20):
        save(ledger, step)
    choice = ledger.newest_verified()
    assert choice.entry is not None
    assert (choice.entry.step, choice.skipped) == (20, [])
    assert choice.entry.orchestrator_state() == b"rollouts 20"
    assert (choice.entry.trainer_dir / "0.distcp").read_text() == "weights 20"


@pytest.mark.parametrize("name", ["trainer/0.distcp", "orchestrator.msgpack", "manifest.json"])
@pytest.mark.parametrize("how", ["remove", "truncate", "flip"])
def test_damaged_entry_is_skipped_with_the_reason(tmp_path: Path, name: str, how: str) -> None:
    ledger = CheckpointLedger(tmp_path / "checkpoints")
    save(ledger, 10)
    path = save(ledger, 20).path / name
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data[:-3] if how == "truncate" else data)
    choice = ledger.newest_verified()
    assert choice.entry is not None
    assert choice.entry.step == 10
    ((step, reason),) = choice.skipped
    assert step == 20
    assert "step-000020" in reason


def test_unfinished_entry_is_invisible_and_swept(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path / "checkpoints")
    save(ledger, 10)
    ledger.stage(20, token="attempt-1").create()
    assert ledger.steps() == [10]
    assert ledger.retain(keep_last=3) == []
    assert os.listdir(ledger.root) == ["step-000010"]


def test_failed_commit_leaves_earlier_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = CheckpointLedger(tmp_path / "checkpoints")
    save(ledger, 10)

    def quota(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr("hpcrl.checkpoints.ledger.os.fsync", quota)
        with pytest.raises(OSError, match="quota"):
            save(ledger, 20)
    assert ledger.steps() == [10]
    save(ledger, 20)
    assert ledger.steps() == [10, 20]


def test_a_later_attempt_replaces_its_own_future(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path / "checkpoints")
    save(ledger, 20, "old")
    entry = save(ledger, 20, "new", attempt=2)
    entry.verify()
    assert (entry.trainer_dir / "0.distcp").read_text() == "new 20"
    assert entry.manifest.attempt == 2


def test_retention(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path / "checkpoints")
    for step in (1, 2, 3, 4):
        save(ledger, step)
    assert ledger.retain(keep_last=2) == [1, 2]
    assert ledger.steps() == [3, 4]


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path / "checkpoints")
    manifest = save(ledger, 1).path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match="format 2"):
        CheckpointEntry.open(ledger.path_of(1))
