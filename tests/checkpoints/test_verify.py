"""Comparing an entry with its manifest: what may go wrong while reading."""

from __future__ import annotations

import errno
import os
import queue
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash
from ledger_testing import save_as

from hpcrl.checkpoints import CheckpointEntry, CheckpointWriter
from hpcrl.checkpoints.verify import damaged_files
from hpcrl.errors import CheckpointError, DeadlineError
from hpcrl.storage.files import FileRecord


@pytest.fixture
def entry(tmp_path: Path) -> CheckpointEntry:
    return save_as(CheckpointWriter.claim(tmp_path, 1), 7, files=20)


def test_all_problems_are_named_in_order(entry: CheckpointEntry) -> None:
    (entry.path / "trainer" / "3.distcp").unlink()
    (entry.path / "trainer" / "11.distcp").write_bytes(b"x")
    (entry.path / "orchestrator.msgpack").write_bytes(b"rollouts 8")
    with pytest.raises(CheckpointError) as error_info:
        entry.verify()
    text = str(error_info.value)
    assert (
        text.index("orchestrator.msgpack does not have")
        < text.index("11.distcp has 1 bytes")
        < text.index("3.distcp is")
    )
    with pytest.raises(CheckpointError) as error_info:
        entry.verify(content=False)
    assert "orchestrator" not in str(error_info.value)


def test_a_read_that_hangs_ends_with_the_deadline(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs")  # opening it waits for a writer, for ever
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"hint: a longer checkpoint\.verify_timeout_s"):
        damaged_files(tmp_path, {"hangs": FileRecord(0, "")}, deadline_s=0.2)
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("deadline_s", [0.0, 0.2, None])
def test_no_answer_is_waited_for_beyond_the_deadline(
    deadline_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []

    class Answers(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            asked.append(timeout)
            return super().get(block, timeout)

    monkeypatch.setattr(queue, "SimpleQueue", Answers)
    (tmp_path / "there").write_bytes(b"")
    if deadline_s is None:
        assert damaged_files(tmp_path, {"there": FileRecord(1, "")}) == ["there has 0 bytes, the manifest says 1"]
        assert asked == [None]
        return
    os.mkfifo(tmp_path / "hangs")
    with pytest.raises(DeadlineError):
        damaged_files(tmp_path, {"hangs": FileRecord(0, "")}, deadline_s=deadline_s)
    (seconds,) = asked
    assert seconds is not None
    assert 0.0 <= seconds <= deadline_s


def failing_open(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[Path]:
    """The first ``times`` opens of trainer files fail."""
    opened, real = [], Path.open

    def open_(path: Path, *args: Any, **keywords: Any) -> Any:
        if path.suffix == ".distcp":
            opened.append(path)
            if len(opened) <= times:
                raise OSError(number, os.strerror(number))
        return real(path, *args, **keywords)

    monkeypatch.setattr(Path, "open", open_)
    return opened


def test_a_stale_handle_is_asked_again(entry: CheckpointEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = failing_open(monkeypatch, errno.ESTALE, 2)
    entry.verify()
    assert len(opened) == 22


def test_a_handle_that_stays_stale_is_damage(entry: CheckpointEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = failing_open(monkeypatch, errno.ESTALE, 1000)
    with pytest.raises(CheckpointError, match=r"0\.distcp cannot be read: Stale file handle"):
        entry.verify()
    assert len(opened) == 3 * 20


def test_other_errors_are_not_asked_again(entry: CheckpointEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = failing_open(monkeypatch, errno.EIO, 1000)
    with pytest.raises(CheckpointError):
        entry.verify()
    assert len(opened) == 20


@pytest.mark.parametrize("times", [2, 3])
def test_an_error_without_a_text_is_reported_by_its_type(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> os.stat_result:
        raise OSError("the client went away" * times)

    monkeypatch.setattr(Path, "stat", refuse)
    assert damaged_files(tmp_path, {"a": FileRecord(1, "")}) == [f"a cannot be read: {'the client went away' * times}"]


def test_what_is_wrong_with_the_program_is_raised(tmp_path: Path) -> None:
    """No file system takes such a name: not the file is damaged."""
    with pytest.raises(ValueError, match="null"):
        damaged_files(tmp_path, {"a\0b": FileRecord(1, "")}, deadline_s=30.0)


def test_no_files_have_no_problems(tmp_path: Path) -> None:
    assert damaged_files(tmp_path, {}) == []


def test_a_large_file_is_compared_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.checkpoints.verify._READ_BLOCK_BYTES", 4)
    data = b"0123456789"
    (tmp_path / "a").write_bytes(data)
    files = {"a": FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))}
    assert damaged_files(tmp_path, files, deadline_s=60.0) == []
    (tmp_path / "a").write_bytes(data[:-1] + b"8")
    (problem,) = damaged_files(tmp_path, files, deadline_s=60.0)
    found, recorded = (xxhash.xxh3_128_hexdigest(each) for each in (b"0123456788", data))
    assert problem == (
        f"a does not have the content that the manifest says (XXH3-128 {found}, the manifest says {recorded})"
    )


def test_a_slow_read_ends_between_two_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is looked at after each block, so that no thread reads on behind an answer that was given up."""
    monkeypatch.setattr("hpcrl.checkpoints.verify._READ_BLOCK_BYTES", 1)
    now, data = iter(range(1000)), b"0123456789"
    monkeypatch.setattr("hpcrl.checkpoints.verify.time.monotonic", lambda: float(next(now)))
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DeadlineError, match=r"compared with its manifest within the timeout"):
        damaged_files(tmp_path, {"a": FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))}, deadline_s=5.0)


def test_what_cannot_be_read_is_damaged(entry: CheckpointEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_open(monkeypatch, errno.EIO, 1)
    with pytest.raises(CheckpointError, match=r"distcp cannot be read: Input/output error"):
        entry.verify()
