"""Comparing an entry with its manifest: what may go wrong while reading."""

from __future__ import annotations

import errno
import os
import queue
import time
from pathlib import Path
from typing import Any

import pytest
from ledger_testing import save_as

from hpcrl.checkpoints import CheckpointEntry, CheckpointWriter
from hpcrl.checkpoints.verify import damaged_files
from hpcrl.errors import CheckpointError, DeadlineError
from hpcrl.fs import FileRecord


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


def test_what_cannot_be_read_is_damaged(entry: CheckpointEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_open(monkeypatch, errno.EIO, 1)
    with pytest.raises(CheckpointError, match=r"distcp cannot be read: Input/output error"):
        entry.verify()
