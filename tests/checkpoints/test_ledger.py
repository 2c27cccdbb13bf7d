"""The ledger: an entry is joint and whole, or it is not an entry."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from ledger_testing import hidden, save, save_as

from hpcrl.checkpoints import CheckpointEntry, CheckpointLedger, CheckpointWriter, expected_save_s
from hpcrl.checkpoints.ledger import CheckpointManifest
from hpcrl.errors import CheckpointError
from hpcrl.storage.files import write_json


def test_newest_good_entry_is_chosen(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path)
    assert ledger.newest_verified() == (None, [])
    for step in (10, 20):
        save(tmp_path, step)
    choice = ledger.newest_verified()
    assert choice.entry is not None
    assert (choice.entry.step, choice.skipped) == (20, [])
    assert choice.entry.orchestrator_state() == b"rollouts 20"
    assert (choice.entry.trainer_dir / "0.distcp").read_text() == "weights 20"


@pytest.mark.parametrize("name", ["trainer/0.distcp", "orchestrator.msgpack", "manifest.json"])
@pytest.mark.parametrize("how", ["remove", "truncate", "flip"])
def test_damaged_entry_is_skipped_with_the_reason(tmp_path: Path, name: str, how: str) -> None:
    ledger = CheckpointLedger(tmp_path)
    save(tmp_path, 10)
    path = save(tmp_path, 20).path / name
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


def test_unfinished_entry_is_invisible_and_goes_with_the_next_claim(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path)
    save(tmp_path, 10)
    CheckpointWriter.claim(tmp_path, 1).stage(20)
    assert ledger.steps() == [10]
    assert [name.rsplit("/", 1)[1] for name in hidden(tmp_path)] == ["step-000020"]
    writer = CheckpointWriter.claim(tmp_path, 2)
    assert hidden(tmp_path) == []
    assert writer.retain(keep_last=3) == []
    assert sorted(os.listdir(tmp_path)) == [writer.fence.path.name, "history.jsonl", "step-000010"]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC, errno.EIO])
def test_failed_commit_leaves_earlier_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    ledger, writer = CheckpointLedger(tmp_path), CheckpointWriter.claim(tmp_path, 1)
    save_as(writer, 10)

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("hpcrl.storage.files.os.fsync", refuse)
        with pytest.raises(OSError, match=os.strerror(number)):
            save_as(writer, 20)
    assert ledger.steps() == [10]
    assert hidden(tmp_path) == []
    save_as(writer, 20)
    assert ledger.steps() == [10, 20]


def test_a_file_that_differs_from_its_manifest_invalidates_the_entry(tmp_path: Path) -> None:
    writer = CheckpointWriter.claim(tmp_path, 1)
    with pytest.raises(CheckpointError, match="its writer wrote"):
        save_as(writer, 10, lost_bytes=1)
    assert writer.ledger.steps() == []
    assert hidden(tmp_path) == []


def test_a_later_attempt_replaces_its_own_future(tmp_path: Path) -> None:
    save(tmp_path, 20, "old")
    entry = save(tmp_path, 20, "new", attempt=2)
    entry.verify()
    assert (entry.trainer_dir / "0.distcp").read_text() == "new 20"
    assert entry.manifest.attempt == 2
    assert hidden(tmp_path) == []


def test_an_entry_of_another_step_is_not_joint(tmp_path: Path) -> None:
    entry = save(tmp_path, 20)
    os.rename(entry.path, tmp_path / "step-000030")
    with pytest.raises(CheckpointError, match="not joint"):
        CheckpointLedger(tmp_path).open(30)


def test_expected_time_of_a_save_is_what_was_measured(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path)
    assert expected_save_s(ledger) is None
    for step, seconds in ((1, 900.0), (2, 5.0), (3, 30.0), (4, 7.0)):
        entry = save(tmp_path, step)
        manifest = {name: getattr(entry.manifest, name) for name in CheckpointManifest.__struct_fields__}
        write_json(entry.path / "manifest.json", CheckpointManifest(**{**manifest, "save_s": seconds}))
    (ledger.path_of(4) / "manifest.json").write_text("torn")
    # of the last three, one cannot be read; a save may have to wait for one that is under way
    assert expected_save_s(ledger) == 2 * 30.0


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path)
    manifest = save(tmp_path, 1).path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(CheckpointError, match="format 3, this hpcrl reads 2"):
        CheckpointEntry.open(ledger.path_of(1))


def test_an_entry_of_the_first_format_is_named_as_such_when_it_is_skipped(tmp_path: Path) -> None:
    """It had fewer fields; what is said is not that one is missing."""
    ledger = CheckpointLedger(tmp_path)
    save(tmp_path, 1)
    path = save(tmp_path, 2).path / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {k: v for k, v in manifest.items() if k not in ("policy_version", "blocked_s")} | {"format_version": 1}
        )
    )
    choice = ledger.newest_verified()
    assert choice.entry is not None
    assert choice.entry.step == 1
    assert choice.skipped == [(2, f"{path} cannot be read: it has format 1, this hpcrl reads 2")]
