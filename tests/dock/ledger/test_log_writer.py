"""The writer of a ledger: what is durable when it says so, in which file, and what a filesystem that refuses leaves."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_entries import finished

from hpcrl.dock.ledger import log as logs
from hpcrl.dock.ledger.entries import Begin, Dropped, Entry, Kept, PayloadPlace, Taken, TurnSaved, read_entries
from hpcrl.dock.ledger.log import RolloutLog


def open_log(path: Path, **how: Any) -> RolloutLog:
    return RolloutLog(path, **{"attempt": 1, "restored": 0, "limit_s": 5.0, **how})


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RolloutLog]:
    log = open_log(tmp_path)
    yield log
    log.close()


def keep(log: RolloutLog, group: int, member: int = 0) -> Any:
    arrays = {"tokens": np.full(10, group, dtype=np.int32)}
    return log.finish(b"", arrays, lambda place: finished(group, member, place=place))


def written(log: RolloutLog) -> list[Entry]:
    return list(read_entries(log.ledger_dir))[1:]  # without the beginning


def test_a_ledger_begins_with_who_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs.time, "time", lambda: 2e9)
    for attempt in (3, 4):
        log = open_log(tmp_path, attempt=attempt, restored=7)
        log.close()
        size = (log.ledger_dir / "000001.jsonl").stat().st_size
        *_, entry = read_entries(log.ledger_dir)
        believed, number = ({}, 1) if attempt == 3 else ({"000001.jsonl": size}, 2)
        assert entry == Begin(attempt=attempt, restored=7, time_s=2e9, believed=believed, format_version=number)


def test_each_writer_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "000004.jsonl").touch()
    numbers = list[int]()
    together = threading.Barrier(6)

    def opens() -> None:
        together.wait(60.0)
        log = open_log(tmp_path)
        numbers.append(log.number)
        log.close()

    threads = [threading.Thread(target=opens) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [5, 6, 7, 8, 9, 10]


def test_columns_lie_in_files_of_their_writer(tmp_path: Path) -> None:
    open_log(tmp_path).close()
    log = open_log(tmp_path, attempt=2)
    place = keep(log, 0).result(10.0).payload
    log.close()
    assert place.file == "000002-000001.columns"


def test_an_entry_is_durable_when_its_future_is_done(log: RolloutLog, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[bytes](), os.fsync
    path = log.ledger_dir / "000001.jsonl"

    def noted(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), path.stat()):
            synced.append(path.read_bytes())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    for group in range(3):
        log.append(Kept(group=group)).result(10.0)
        assert synced[-1] == path.read_bytes()
        assert synced[-1].count(b"\n") == group + 2


def test_columns_are_durable_before_the_entry_that_names_them(log: RolloutLog, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[str](), os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    keep(log, 0).result(10.0)
    assert synced == [".columns", "", ".jsonl"]  # the second is the directory


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_lines_are_whole_however_few_bytes_the_system_takes(
    log: RolloutLog, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:most], offset))
    for group in range(3):
        log.append(Kept(group=group)).result(10.0)
    assert written(log) == [Kept(group=group) for group in range(3)]


def test_a_line_that_was_torn_is_written_anew_at_its_place(log: RolloutLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(Kept(group=0)).result(10.0)
    real, calls = os.pwrite, list[int]()

    def torn(fd: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "for a while")
        return real(fd, data[:9] if len(calls) == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", torn)
    log.append(Kept(group=1)).result(30.0)
    assert (calls[1], calls[2]) == (calls[0] + 9, calls[0])
    assert written(log) == [Kept(group=0), Kept(group=1)]


def test_behind_a_hole_nothing_is_written(log: RolloutLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EPERM, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(PermissionError):
            log.append(Kept(group=0)).result(10.0)
    with pytest.raises(PermissionError):
        log.append(Kept(group=1)).result(10.0)
    assert written(log) == []


def test_a_filesystem_that_hangs_is_left_alone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, let, hangs = open_log(tmp_path), threading.Event(), threading.Event()
    real = os.pwrite

    def hang(fd: int, data: Any, offset: int) -> int:
        hangs.set()
        let.wait(60.0)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", hang)
    monkeypatch.setattr(logs, "_CLOSE_S", 0.05)
    future = log.append(Kept(group=0))
    assert hangs.wait(60.0)
    log.close()
    assert "the filesystem did not answer for 0.05 s" in caplog.text
    let.set()
    assert future.result(10.0) == Kept(group=0)


def test_what_was_appended_is_written_before_the_end(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    futures = [log.append(Kept(group=group)) for group in range(50)]
    log.close()
    assert all(future.done() for future in futures)
    assert written(log) == [Kept(group=group) for group in range(50)]


class Memory:
    """Stands in for a warehouse."""

    full = False

    def __init__(self) -> None:
        self.kept: list[tuple[int, int]] = []

    def put(self, place: PayloadPlace, pieces: Any) -> bool:
        assert sum(len(memoryview(piece).cast("B")) for piece in pieces) == place.bytes
        self.kept.append((place.offset, place.bytes))
        return True


def test_memory_is_given_what_trainers_will_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished rollouts: no turns, nothing without columns, and nothing that was dropped as it was written."""
    memory: Any = Memory()
    log = open_log(tmp_path, warehouse=memory)
    write, let, hangs = log._payload.write, threading.Event(), threading.Event()

    def slow(blocks: Any) -> Any:
        hangs.set()
        let.wait(60.0)
        return write(blocks)

    monkeypatch.setattr(log._payload, "write", slow)
    first = keep(log, 0)
    assert hangs.wait(60.0)  # what comes now is written together
    arrays = {"tokens": np.zeros(3, dtype=np.int32)}

    def turn(place: PayloadPlace) -> Entry:
        return TurnSaved(
            group=1,
            member=0,
            turn=0,
            environment="words",
            prompt_index=1,
            tokens=3,
            first_version=0,
            last_version=0,
            payload=place,
        )

    rest = [log.finish(b"", arrays, turn), keep(log, 2), keep(log, 2, 1), keep(log, 3)]
    log.append(finished(4, 0))
    log.append(Dropped(group=2, members=[1], why="too old"))
    log.append(Taken(step=1, groups=[(0, [0])]))
    let.set()
    log.close()
    places = [first.result().payload, rest[1].result().payload, rest[3].result().payload]
    assert memory.kept == [(place.offset, place.bytes) for place in places]


def test_files_of_which_all_is_durable_are_behind_the_oldest_that_is_not(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert log.oldest_unsettled == "000001-000000.columns"  # before all
    log._payload._file_bytes = 1
    for number in (1, 2, 3):
        keep(log, number).result(10.0)
        log.append(Kept(group=number)).result(10.0)
        assert log.oldest_unsettled == f"000001-00000{number}.columns"
    log.close()
