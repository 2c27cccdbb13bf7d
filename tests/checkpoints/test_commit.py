"""What the manifest of an entry says of its save, and what is staged."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash
from ledger_testing import hidden, save_as, write_files

from hpcrl.checkpoints import CheckpointEntry, CheckpointLedger, CheckpointWriter
from hpcrl.checkpoints.history import read_saved
from hpcrl.errors import CheckpointError, FencedError
from hpcrl.storage.fence import Fence
from hpcrl.storage.files import FileRecord
from hpcrl.storage.quarantine import list_asides

NOW_S = 2e9


@pytest.fixture
def writer(tmp_path: Path) -> CheckpointWriter:
    return CheckpointWriter.claim(tmp_path, 3)


def commit(writer: CheckpointWriter, *, started_at_s: float = NOW_S, **others: float) -> CheckpointEntry:
    records = write_files(writer.stage(5), b"weights", files=2)
    return writer.commit(
        step=5, world_size=4, files=records, orchestrator_state=b"rollouts", started_at_s=started_at_s, **others
    )


@pytest.mark.parametrize(("ago_s", "save_s"), [(40.0, 40.0), (0.0, 0.0), (-100.0, 0.0), (2e7, 1e7)])
def test_the_time_of_a_save_is_measured_and_survives_a_clock_that_was_set(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch, ago_s: float, save_s: float
) -> None:
    monkeypatch.setattr("hpcrl.checkpoints.writer.time.time", lambda: NOW_S)
    assert commit(writer, started_at_s=NOW_S - ago_s).manifest.save_s == save_s
    assert writer.ledger.open(5).manifest.save_s == save_s


def test_a_manifest_says_what_was_saved_by_whom(writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.checkpoints.writer.time.time", lambda: NOW_S)
    made = commit(writer, blocked_s=2.5)
    entry = CheckpointLedger(writer.root).open(5)
    assert (entry.path, entry.manifest) == (made.path, made.manifest)
    found = entry.manifest
    assert (found.step, found.policy_version, found.attempt, found.world_size) == (5, 5, 3, 4)
    assert (found.created_at_s, found.blocked_s) == (NOW_S, 2.5)
    files = {name: (entry.path / name).read_bytes() for name in found.files}
    assert files == {
        "trainer/0.distcp": b"weights",
        "trainer/1.distcp": b"weights",
        "orchestrator.msgpack": b"rollouts",
    }
    assert found.files == {name: FileRecord(len(data), xxhash.xxh3_128_hexdigest(data)) for name, data in files.items()}


def test_a_save_that_blocked_nothing_says_so(writer: CheckpointWriter) -> None:
    assert commit(writer, started_at_s=time.time()).manifest.blocked_s == 0.0


def test_an_entry_is_in_the_history_of_its_run(writer: CheckpointWriter) -> None:
    commit(writer)
    assert [(each.step, each.attempt) for each in read_saved(writer.root)] == [(5, 3)]


def test_an_entry_counts_without_its_line_in_the_history(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcrl.checkpoints.writer.add_saved", refuse)
    assert commit(writer).step == 5
    assert writer.ledger.steps() == [5]
    assert "the checkpoint of step 5 is not in history.jsonl: [Errno 28]" in caplog.text


def test_what_was_staged_can_be_discarded(writer: CheckpointWriter) -> None:
    path = writer.stage(7)
    assert path == writer.staged(7)
    assert [each.name for each in path.iterdir()] == ["trainer"]
    writer.discard(7)
    assert hidden(writer.root) == []


def test_what_a_failed_save_has_left_is_not_in_the_next(writer: CheckpointWriter) -> None:
    write_files(writer.stage(5), b"old", files=3)
    entry = commit(writer)
    assert sorted(each.name for each in entry.trainer_dir.iterdir()) == ["0.distcp", "1.distcp"]
    entry.verify()


def test_a_newer_attempt_is_named_where_an_entry_is_staged(writer: CheckpointWriter) -> None:
    CheckpointWriter.claim(writer.root, 4)
    with pytest.raises(FencedError):
        writer.stage(5)


def test_a_newer_attempt_is_named_where_it_comes_while_an_entry_is_staged(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = type(writer.fence).create

    def and_a_newer_comes(fence: object, name: str) -> Path:
        path = create(writer.fence, name)
        CheckpointWriter.claim(writer.root, 4)
        return path

    monkeypatch.setattr("hpcrl.storage.fence.Fence.create", and_a_newer_comes)
    with pytest.raises(FencedError):
        writer.stage(5)


def test_a_directory_that_cannot_be_made_is_not_staged(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("hpcrl.checkpoints.writer.lost_replies", SimpleNamespace(make_own_directory=gone))
        with pytest.raises(FileNotFoundError, match="trainer"):
            writer.stage(5)


def test_a_newer_attempt_is_named_where_an_entry_is_committed(writer: CheckpointWriter) -> None:
    records = write_files(writer.stage(5), b"weights", files=1)
    CheckpointWriter.claim(writer.root, 4)
    with pytest.raises(FencedError):
        writer.commit(step=5, world_size=1, files=records, orchestrator_state=b"", started_at_s=time.time())
    assert writer.ledger.steps() == []


def test_a_newer_attempt_is_named_also_where_it_comes_after_the_first_look(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the trainer is not there any more: that is not what went wrong."""
    check = Fence.check
    looks: list[Fence] = []

    def late(fence: Fence) -> None:
        looks.append(fence)
        if len(looks) == 1:
            CheckpointWriter.claim(writer.root, 4)
        else:
            check(fence)

    records = write_files(writer.stage(5), b"weights", files=1)
    monkeypatch.setattr("hpcrl.storage.fence.Fence.check", late)
    with pytest.raises(FencedError):
        writer.commit(step=5, world_size=1, files=records, orchestrator_state=b"", started_at_s=time.time())


def test_a_file_that_is_not_there_is_named(writer: CheckpointWriter) -> None:
    writer.stage(5)
    with pytest.raises(FileNotFoundError, match=r"lost\.distcp"):
        writer.commit(
            step=5,
            world_size=1,
            files={"trainer/lost.distcp": FileRecord(1, "")},
            orchestrator_state=b"",
            started_at_s=time.time(),
        )
    assert hidden(writer.root) == []


@pytest.mark.parametrize("bytes_", [6, 8])
def test_a_file_of_another_size_is_named_with_both(writer: CheckpointWriter, bytes_: int) -> None:
    writer.stage(5)
    (writer.staged(5) / "trainer" / "0.distcp").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match=rf"0\.distcp has 7 bytes, its writer wrote {bytes_}$"):
        writer.commit(
            step=5,
            world_size=1,
            files={"trainer/0.distcp": FileRecord(bytes_, "")},
            orchestrator_state=b"",
            started_at_s=time.time(),
        )


def test_later_entries_are_put_aside_and_taken_back(writer: CheckpointWriter) -> None:
    for step in (2, 4, 6):
        save_as(writer, step)
    assert writer.put_aside_after(2) == [4, 6]
    assert writer.ledger.steps() == [2]
    assert writer.put_aside_after(2) == []
    for aside in list_asides(writer.root, "step-"):
        writer.take_back(aside)
    assert writer.ledger.steps() == [2, 4, 6]
    writer.ledger.open(6).verify()
