"""The ledger of rollouts: what is counted is on disk, wherever its writer ends, and what is wrong with it is seen."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledger_logs import keep, open_log

from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger import entries, payload
from hpcrl.dock.ledger.entries import Begin, Dropped, Finished, Kept, PayloadPlace, Taken, read_entries
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Replay


def test_what_was_written_is_read_back_in_order(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    futures = [keep(log, group, member) for group in range(20) for member in range(3)]
    log.append(Taken(step=1, groups=[(0, [0, 1, 2])]))
    assert all(isinstance(future.result(10.0), Finished) for future in futures)
    log.close()
    entries = list(read_entries(log.ledger_dir))
    assert isinstance(entries[0], Begin)
    found = [entry for entry in entries if isinstance(entry, Finished)]
    assert [(entry.group, entry.member) for entry in found] == [(g, m) for g in range(20) for m in range(3)]
    for entry in found:
        _, arrays = decode_columns(read_payload(log.payload_dir, entry.payload))
        assert set(arrays["tokens"].tolist()) == {10 * entry.group + entry.member}
    assert isinstance(entries[-1], Taken)


class Hanging:
    """A warehouse that takes a block when it is let."""

    full = False

    def __init__(self) -> None:
        self.asked, self.let = threading.Event(), threading.Event()
        self.kept: list[PayloadPlace] = []

    def put(self, place: PayloadPlace, pieces: object) -> bool:
        self.asked.set()
        assert self.let.wait(60.0)
        self.kept.append(place)
        return True


def test_a_rollout_has_finished_when_it_is_durable_whatever_memory_does(tmp_path: Path) -> None:
    """Who waits for it is told before the warehouse is asked; a batch comes behind what its rollouts' blocks need."""
    warehouse: Any = Hanging()
    log = RolloutLog(tmp_path, attempt=1, restored=0, limit_s=5.0, warehouse=warehouse)
    first = keep(log, 0, 0).result(10.0)
    assert warehouse.asked.wait(10.0)
    # written together, when the warehouse has answered: nobody will read what was dropped, or release it once more
    second, third = keep(log, 1, 0), keep(log, 2, 0)
    log.append(Dropped(group=2, members=[0], why="too old"))
    taken = log.append(Taken(step=1, groups=[(0, [0])]))
    assert warehouse.kept == []
    assert not taken.done()
    warehouse.let.set()
    assert taken.result(10.0)
    log.close()
    assert third.done()
    assert warehouse.kept == [first.payload, second.result().payload]


def test_what_is_appended_after_the_end_fails_at_once(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    keep(log, 0, 0)
    log.close()
    with pytest.raises(OSError, match="the ledger of rollouts is closed"):
        keep(log, 1, 0).result(10.0)
    assert [entry.group for entry in read_entries(log.ledger_dir) if isinstance(entry, Finished)] == [0]


def test_who_does_not_wait_any_more_leaves_no_hole(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    writing = [keep(log, group, 0) for group in range(20)]
    assert not any(one.cancel() for one in writing)
    assert [one.result(10.0).group for one in writing] == list(range(20))
    log.close()


def test_files_of_columns_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    log._payload._file_bytes = 3000
    for group in range(10):
        keep(log, group, 0, tokens=400).result(10.0)
    log.close()
    files = sorted(path.name for path in log.payload_dir.iterdir())
    assert len(files) == 5
    assert all(
        read_payload(log.payload_dir, e.payload) for e in read_entries(log.ledger_dir) if isinstance(e, Finished)
    )


def test_a_writer_that_is_killed_leaves_whole_entries_only(tmp_path: Path) -> None:
    """Cut at every byte: an entry that is read has its columns, and the next writer goes on behind it."""
    log = open_log(tmp_path / "whole")
    for member in range(3):
        keep(log, 0, member).result(10.0)
    log.close()
    data = (log.ledger_dir / "000001.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    cut = tmp_path / "cut"
    for end in range(len(data) + 1):
        shutil.rmtree(cut, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", cut)
        (cut / "ledger" / "000001.jsonl").write_bytes(data[:end])
        entries = list(read_entries(cut / "ledger"))
        assert len(entries) == sum(e <= end for e in ends)
    after = open_log(cut, attempt=2)
    keep(after, 1, 0).result(10.0)
    after.close()
    assert len(list(read_entries(after.ledger_dir))) == len(ends) + 2


def test_what_a_writer_adds_that_was_thought_dead_is_not_read(tmp_path: Path) -> None:
    old = open_log(tmp_path)
    keep(old, 0, 0).result(10.0)
    new = open_log(tmp_path, attempt=2)
    keep(old, 0, 1).result(10.0)
    keep(new, 0, 1).result(10.0)
    late = open_log(tmp_path, attempt=1)  # began late, and may not say where the newer one's entries end
    keep(new, 0, 2).result(10.0)
    for log in (old, new, late):
        log.close()
    replay = Replay(read_entries(new.ledger_dir))
    assert not replay.problems
    assert [held.id for held in replay.rollouts] == [(0, 0), (0, 1), (0, 2)]
    assert replay.attempts == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE])
def test_a_filesystem_that_refuses_for_a_while_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    log, real, calls = open_log(tmp_path), payload.os.pwritev, []

    def refuse(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            return int(real(fd, [b"torn"], offset))
        if len(calls) == 2:
            raise OSError(number, "for a while")
        return int(real(fd, buffers, offset))

    monkeypatch.setattr(payload.os, "pwritev", refuse)
    entry = keep(log, 3, 1).result(10.0)
    log.close()
    _, arrays = decode_columns(read_payload(log.payload_dir, entry.payload))
    assert set(arrays["tokens"].tolist()) == {31}
    assert calls[2] == 0  # from its beginning again


def test_what_a_filesystem_refuses_for_good_fails_all_that_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    monkeypatch.setattr(log._payload, "write", lambda blocks: (_ for _ in ()).throw(PermissionError(13, "no")))
    with pytest.raises(PermissionError):
        keep(log, 0, 0).result(10.0)
    with pytest.raises(PermissionError):
        log.append(Kept(group=0)).result(10.0)
    log.close()
    assert [type(entry) for entry in read_entries(log.ledger_dir)] == [Begin]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_columns_that_were_damaged_are_seen(tmp_path: Path, damage: str) -> None:
    log = open_log(tmp_path)
    entry = keep(log, 0, 0).result(10.0)
    log.close()
    path = log.payload_dir / entry.payload.file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-9] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises((ValueError, FileNotFoundError)):
        read_payload(log.payload_dir, entry.payload)


def test_a_torn_end_is_ignored_by_all_readers(tmp_path: Path) -> None:
    """A power cut may leave zeros, and whole lines behind them."""
    log = open_log(tmp_path)
    keep(log, 0, 0).result(10.0)
    log.close()
    path = log.ledger_dir / "000001.jsonl"
    begun, line = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(begun + line + bytes(len(line)) + line)
    assert len(list(read_entries(log.ledger_dir))) == 2
    after = open_log(tmp_path, attempt=2)
    keep(after, 0, 1).result(10.0)
    after.close()
    replay = Replay(read_entries(log.ledger_dir))
    assert not replay.problems
    assert [held.id for held in replay.rollouts] == [(0, 0), (0, 1)]


def test_a_line_that_was_believed_and_cannot_be_read_is_named(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    keep(log, 0, 0).result(10.0)
    log.close()
    open_log(tmp_path, attempt=2).close()
    path = log.ledger_dir / "000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"finished"', b'"fini?hed"'))
    with pytest.raises(ValueError, match=r"000001\.jsonl, line 2"):
        list(read_entries(log.ledger_dir))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [(1, r"000001\.jsonl ends at byte \d+ of the \d+ that a later file names"), (0, r"000001\.jsonl is missing, and")],
)
def test_entries_that_an_earlier_file_had_are_not_lost_in_silence(lines: int, problem: str, tmp_path: Path) -> None:
    log = open_log(tmp_path)
    keep(log, 0, 0).result(10.0)
    log.close()
    for attempt in (2, 3):
        open_log(tmp_path, attempt=attempt).close()
    path = log.ledger_dir / "000001.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)[:lines]
    path.write_bytes(b"".join(kept)) if kept else path.unlink()
    with pytest.raises(ValueError, match=problem):
        list(read_entries(log.ledger_dir))


def test_another_format_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.close()
    path = log.ledger_dir / "000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"format_version":1', b'"format_version":7'))
    with pytest.raises(ValueError, match="format 7, this hpcrl reads 1"):
        list(read_entries(log.ledger_dir))


def test_a_new_process_uses_the_report_of_its_predecessor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files before the newest nothing is read to say so; what a dead process writes later changes nothing."""
    for attempt in (1, 2):
        log = open_log(tmp_path, attempt=attempt)
        keep(log, attempt, 0).result()
        log.close()
    first = tmp_path / "ledger" / "000001.jsonl"
    size = first.stat().st_size
    with first.open("ab") as stream:
        stream.write(b'{"entry":"kept","group":1}\n')
    read: list[str] = []
    measure = entries.whole_bytes
    monkeypatch.setattr(entries, "whole_bytes", lambda path: (read.append(path.name), measure(path))[1])
    log = open_log(tmp_path, attempt=3)
    log.close()
    assert read == ["000002.jsonl"]
    *_, newest = (entry for entry in read_entries(tmp_path / "ledger") if isinstance(entry, Begin))
    assert newest.believed == {"000001.jsonl": size, "000002.jsonl": (tmp_path / "ledger/000002.jsonl").stat().st_size}


@pytest.mark.parametrize("size", [11, 1 << 39, 1 << 40])
def test_memory_is_not_taken_for_a_block_that_a_file_has_not(size: int, tmp_path: Path) -> None:
    (tmp_path / "000001-000001.columns").write_bytes(bytes(10))
    with pytest.raises(ValueError, match="before the end of a rollout"):
        read_payload(tmp_path, PayloadPlace("000001-000001.columns", 0, size, "00"))


@pytest.mark.parametrize(
    "place", ['["a", -1, 1, ""]', '["a", 0, -1, ""]', f'["a", 0, {1 << 62}, ""]', f'["a", {1 << 62}, 1, ""]']
)
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(place, type=PayloadPlace)
