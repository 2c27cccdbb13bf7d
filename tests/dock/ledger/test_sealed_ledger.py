"""A ledger in several files, of which those that have ended are compressed: no entry is lost or read twice."""

from __future__ import annotations

import errno
import gzip
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_entries import finished
from ledger_logs import keep
from patience import wait_for

from hpcrl.dock.ledger import entries, sealer
from hpcrl.dock.ledger import log as logs
from hpcrl.dock.ledger.entries import (
    Begin,
    Entry,
    Finished,
    Kept,
    PayloadPlace,
    ledger_bytes,
    ledger_files,
    read_entries,
)
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Replay
from hpcrl.dock.ledger.sealer import seal_ended_files
from hpcrl.storage.sealed_files import remove_remains, sealed_path


def short_log(path: Path, *, attempt: int = 1, restored: int = 0, thread: bool = False) -> RolloutLog:
    """A log that needs a further file after some entries."""
    log = RolloutLog(path, attempt=attempt, restored=restored, limit_s=0.5, file_bytes=800)
    if not thread:
        log._sealer.close()
    return log


def fill(log: RolloutLog, groups: range) -> None:
    for group in groups:
        keep(log, group, 0).result(10.0)


def finished_of(group: int, place: PayloadPlace) -> Finished:
    return finished(group, 0, version=5, place=place)


def groups_in(directory: Path) -> list[int]:
    return [entry.group for entry in read_entries(directory) if isinstance(entry, Finished)]


def seal(log: RolloutLog) -> list[str]:
    return seal_ended_files(log.ledger_dir, newest=f"{log.number:06d}.jsonl")


@pytest.fixture
def several(tmp_path: Path) -> RolloutLog:
    """A log with several files, which is closed."""
    log = short_log(tmp_path)
    fill(log, range(12))
    log.close()
    assert len(ledger_files(log.ledger_dir)) == log.number == 4
    return log


def test_a_long_file_is_continued_and_nothing_is_restored(tmp_path: Path) -> None:
    log = short_log(tmp_path, restored=2)
    arrays = {"tokens": np.zeros(3, np.int32)}
    for group in range(12):  # versions that a restore of step 2 would mirror
        log.finish(b"", arrays, partial(finished_of, group)).result(10.0)
    log.close()
    begins = [entry for entry in read_entries(log.ledger_dir) if isinstance(entry, Begin)]
    assert [begin.continues for begin in begins] == [0, 1, 2, 3]
    assert [begin.format_version for begin in begins] == [1, 2, 2, 2]  # earlier versions refuse 2
    assert [list(begin.believed) for begin in begins[1:]] == [[f"00000{number}.jsonl"] for number in (1, 2, 3)]
    replay = Replay(read_entries(log.ledger_dir))
    assert (replay.attempts, replay.problems) == (1, [])
    assert [(held.id, held.pivots) for held in replay.rollouts] == [((group, 0), []) for group in range(12)]


def test_the_thread_of_the_writer_seals_what_has_ended(tmp_path: Path) -> None:
    log = short_log(tmp_path, thread=True)
    fill(log, range(12))
    plain = log.ledger_dir / "000004.jsonl"
    ended = {f"00000{number}.jsonl.gz" for number in (1, 2, 3)}
    wait_for(lambda: {path.name for path in log.ledger_dir.iterdir()} == {*ended, plain.name}, 20.0, "sealed files")
    sizes = [len(gzip.decompress((log.ledger_dir / name).read_bytes())) for name in sorted(ended)]
    assert ledger_bytes(log.ledger_dir) == sum(sizes) + plain.stat().st_size
    fill(log, range(12, 14))
    log.close()
    assert groups_in(log.ledger_dir) == list(range(14))


def test_a_look_that_fails_is_repeated_after_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused, real = list[str](), sealer.seal_file

    def refuse(path: Path, **_: Any) -> bool:
        refused.append(path.name)
        raise OSError(errno.EDQUOT, "no room")

    log = short_log(tmp_path, thread=True)
    monkeypatch.setattr(sealer, "seal_file", refuse)
    fill(log, range(4))
    wait_for(lambda: "are not compressed now: [Errno 122] no room" in caplog.text, 20.0, "message")
    assert (log.ledger_dir / refused[0]).is_file()
    monkeypatch.setattr(sealer, "seal_file", real)
    fill(log, range(4, 8))
    wait_for(lambda: not (log.ledger_dir / "000001.jsonl").exists(), 20.0, "a sealed file")
    log.close()
    assert groups_in(log.ledger_dir) == list(range(8))


def test_the_next_process_continues_from_sealed_files(several: RolloutLog) -> None:
    seal(several)
    sizes = {path.name: 0 for path in ledger_files(several.ledger_dir)}
    log = short_log(several.ledger_dir.parent, attempt=2)
    fill(log, range(12, 14))
    assert seal(log) == ["000004.jsonl"]
    log.close()
    begins = [entry for entry in read_entries(log.ledger_dir) if isinstance(entry, Begin)]
    assert (begins[-1].attempt, begins[-1].continues) == (2, 0)
    assert begins[-1].believed.keys() == sizes.keys()
    assert [path.name for path in log.ledger_dir.iterdir() if path.suffix == ".jsonl"] == ["000005.jsonl"]
    replay = Replay(read_entries(log.ledger_dir))
    assert (replay.attempts, replay.problems) == (2, [])
    assert [held.id for held in replay.rollouts] == [(group, 0) for group in range(14)]
    assert all(read_payload(log.payload_dir, held.entry.payload) for held in replay.rollouts)


class Killed(BaseException):
    """The process ends before an operation, and does no other one."""


def kill_before(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let no operation on files happen from this one on; returns the operations so far."""
    done: list[str] = []

    def mortal(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **how: Any) -> Any:
            if len(done) >= number:
                raise Killed(name)
            done.append(name)
            return real(*args, **how)

        monkeypatch.setattr(os, name, call)

    for name in ("fchmod", "fsync", "replace", "unlink"):
        mortal(name)
    return done


def test_a_process_may_be_killed_before_each_operation(
    several: RolloutLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file or both forms are left; readers take one, and the next process completes it."""
    whole = list(read_entries(several.ledger_dir))
    seen = set[tuple[bool, bool]]()
    for number in itertools.count():
        directory = tmp_path / f"kill-{number}"
        shutil.copytree(several.ledger_dir, directory)
        try:
            with monkeypatch.context() as patch:
                done = kill_before(patch, number)
                seal_ended_files(directory, newest="000004.jsonl")
        except Killed:
            pass
        else:
            break
        for path in ledger_files(directory):
            seen.add((path.exists(), sealed_path(path).exists()))
        assert list(read_entries(directory)) == whole, done
        remove_remains(directory)
        seal_ended_files(directory, newest="000004.jsonl")
        assert sorted(os.listdir(directory)) == [*(f"00000{n}.jsonl.gz" for n in (1, 2, 3)), "000004.jsonl"], done
        assert list(read_entries(directory)) == whole, done
    # for each of three files: mode, sync of the content, name, sync of the directory, removal of the file
    operations = ["fchmod", "fsync", "replace", "fsync", "unlink"]
    assert [name for name in done if name != "unlink"] == 3 * operations[:-1]
    assert seen == {(True, False), (True, True), (False, True)}


WRITER = """
import sys
from pathlib import Path
from hpcrl.dock.ledger import sealer
from hpcrl.dock.ledger.entries import Kept
from hpcrl.dock.ledger.log import RolloutLog

sealer._SETTLE_S = 0.0
attempt = int(sys.argv[2])
log = RolloutLog(Path(sys.argv[1]), attempt=attempt, restored=0, limit_s=1.0, file_bytes=800)
for number in range(10_000_000):
    log.append(Kept(group=attempt * 10_000_000 + number)).result(60.0)
    print(attempt * 10_000_000 + number, flush=True)
"""


def test_what_was_durable_is_found_after_kills_of_real_processes(tmp_path: Path) -> None:
    """Each is killed at another moment, between entries, further files and compressed forms."""
    promised: list[int] = []
    for attempt, enough in enumerate((1, 150, 333, 617), start=1):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = list(itertools.islice(writer.stdout, enough))
            writer.kill()
            lines += [line for line in writer.stdout if line.endswith("\n")]
        promised += map(int, lines)
        found = [entry.group for entry in read_entries(tmp_path / "ledger") if isinstance(entry, Kept)]
        assert len(found) == len(set(found))
        assert set(promised) <= set(found)
    sealed = [path for path in (tmp_path / "ledger").iterdir() if path.suffix == ".gz"]
    assert len(sealed) > 20


def test_bytes_of_a_late_writer_keep_a_file_as_it_is(several: RolloutLog) -> None:
    late = several.ledger_dir / "000002.jsonl"
    with late.open("ab") as stream:
        stream.write(b'{"entry":"kept","group":1}\n')
    assert seal(several) == ["000001.jsonl", "000003.jsonl"]
    assert late.is_file()
    assert groups_in(several.ledger_dir) == list(range(12))


def test_a_file_that_grows_meanwhile_stays(several: RolloutLog, monkeypatch: pytest.MonkeyPatch) -> None:
    path = several.ledger_dir / "000001.jsonl"
    real, size = os.fsync, path.stat().st_size

    def late(fd: int) -> None:
        with path.open("ab") as stream:
            stream.write(b"late\n")
        real(fd)

    monkeypatch.setattr(os, "fsync", late)
    assert "000001.jsonl" not in seal(several)
    assert path.read_bytes()[size:].startswith(b"late\n")
    assert not sealed_path(path).exists()


def test_a_compressed_form_with_other_bytes_replaces_no_file(
    several: RolloutLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty(gzip.GzipFile):
        def write(self, data: Any) -> int:
            return super().write(bytes(len(data)))

    before = sorted(os.listdir(several.ledger_dir))
    with monkeypatch.context() as patch:
        patch.setattr(gzip, "GzipFile", Faulty)
        with pytest.raises(OSError, match="its compressed form has other bytes"):
            seal(several)
    assert sorted(os.listdir(several.ledger_dir)) == before


def test_only_the_newest_process_seals(several: RolloutLog) -> None:
    new = short_log(several.ledger_dir.parent, attempt=2)
    assert seal(several) == []
    new.close()
    assert len(seal(new)) == 4


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_late_process_that_continues_its_file_is_not_read(attempt: int, tmp_path: Path) -> None:
    """Also where both belong to one attempt: it continues a file that is not the newest any more."""
    old = short_log(tmp_path)
    fill(old, range(2))
    new = short_log(tmp_path, attempt=attempt)
    fill(old, range(50, 60))
    assert old.number > new.number
    fill(new, range(2, 10))
    for log in (old, new):
        log.close()
    assert groups_in(new.ledger_dir) == list(range(10))
    assert Replay(read_entries(new.ledger_dir)).attempts == 2
    seal(new)
    after = short_log(tmp_path, attempt=3)
    fill(after, range(10, 12))
    after.close()
    assert groups_in(after.ledger_dir) == list(range(12))


def test_where_no_further_file_can_be_made_the_log_stays_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = short_log(tmp_path)

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(logs, "fsync_dir", refuse)
        keep_without_columns(log, 8)
    assert log.number == 1
    assert "stays in one file for now" in caplog.text
    keep_without_columns(log, 30)
    assert log.number > 1
    log.close()
    assert sum(isinstance(entry, Kept) for entry in read_entries(log.ledger_dir)) == 38 * 5


def keep_without_columns(log: RolloutLog, count: int) -> None:
    for number in range(count):
        futures = [log.append(Kept(group=number)) for _ in range(5)]
        futures[-1].result(10.0)


def test_where_the_further_file_cannot_begin_no_entry_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its first entry is durable is unknown: what the file before would get then might not be believed."""
    log = short_log(tmp_path)
    real = os.pwrite

    def refuse(fd: int, data: Any, offset: int) -> int:
        if offset == 0:
            real(fd, data, offset)
            raise PermissionError(errno.EPERM, "no")
        return real(fd, data, offset)

    written: list[Entry] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        for group in range(100):
            future = log.append(Kept(group=group))
            if future.exception(10.0) is not None:
                break
            written.append(future.result())
    with pytest.raises(PermissionError):
        log.append(Kept(group=100)).result(10.0)
    log.close()
    assert 0 < len(written) < 99
    assert [entry for entry in read_entries(log.ledger_dir) if isinstance(entry, Kept)] == written
    after = short_log(tmp_path, attempt=2)
    after.append(Kept(group=100)).result(10.0)
    after.close()
    assert [entry for entry in read_entries(log.ledger_dir) if isinstance(entry, Kept)] == [*written, Kept(group=100)]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("first line", r"000001\.jsonl, line 1 cannot be read, and a later file names it"),
        ("flip", r"000001\.jsonl(\.gz is damaged|, line)"),
        ("cut", r"000001\.jsonl\.gz is damaged"),
        ("gone", r"000001\.jsonl is missing, and a later file names it"),
    ],
)
def test_a_damaged_sealed_file_is_named(damage: str, problem: str, several: RolloutLog) -> None:
    seal(several)
    path = several.ledger_dir / "000001.jsonl.gz"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    if damage == "gone":
        path.unlink()
    elif damage == "first line":
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b'"begin"', b'"be?in"')))
    else:
        path.write_bytes(data if damage == "flip" else data[:-20])
    with pytest.raises(ValueError, match=problem):
        list(read_entries(several.ledger_dir))


def test_a_reader_continues_where_a_file_is_sealed_meanwhile(
    several: RolloutLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS takes a removed file away from readers on other nodes, in the middle of it."""
    whole = list(read_entries(several.ledger_dir))
    first, real = several.ledger_dir / "000001.jsonl", Path.open

    class Stale:
        def __init__(self) -> None:
            self._lines = first.read_bytes().splitlines(keepends=True)

        def __enter__(self) -> Stale:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __iter__(self) -> Iterator[bytes]:
            yield from self._lines[:2]
            monkeypatch.setattr(Path, "open", real)
            seal(several)
            raise OSError(errno.ESTALE, "stale")

    stale: Any = Stale()
    begins = {path: entries._begin(path) for path in ledger_files(several.ledger_dir)}
    monkeypatch.setattr(entries, "_begin", begins.__getitem__)
    monkeypatch.setattr(Path, "open", lambda path, *how: stale if path == first else real(path, *how))
    found = list(read_entries(several.ledger_dir))
    assert not first.exists()
    assert found == whole


def test_a_listing_that_misses_a_file_is_repeated(several: RolloutLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that changes while it is listed may show a file in neither form."""
    whole, real, calls = list(read_entries(several.ledger_dir)), entries.ledger_files, list[int]()

    def hasty(directory: Path) -> list[Path]:
        calls.append(1)
        return real(directory)[1:] if len(calls) == 1 else real(directory)

    monkeypatch.setattr(entries, "ledger_files", hasty)
    assert list(read_entries(several.ledger_dir)) == whole
    assert len(calls) == 2
