"""Waiting for versions and for a share that fails for a while, by a clock that goes on only while somebody sleeps."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from hpcrl.errors import HandoffError
from hpcrl.weights.format.manifest import Chunk
from hpcrl.weights.format.segments import Segment
from hpcrl.weights.read import share, subscriber
from hpcrl.weights.read.share import Pace, ShareReader, read_small
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

DATA = bytes(range(200)) * 3


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now, self.pauses = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (share, subscriber):
        monkeypatch.setattr(module, "time", clock)
    return clock


# -- for a version


class Listings:
    """Versions of a store by the clock; nobody looks for ever."""

    def __init__(self, clock: Clock, appears: dict[float, int]) -> None:
        self._clock, self._appears, self.looks = clock, appears, 0

    def versions(self) -> list[int]:
        self.looks += 1
        assert self.looks < 1000
        return sorted(version for at, version in self._appears.items() if self._clock.now >= 100.0 + at)


def waiting(tmp_path: Path, clock: Clock, appears: dict[float, int]) -> tuple[Subscriber, Listings]:
    found, listings = Subscriber(tmp_path, None, ReaderSettings()), Listings(clock, appears)
    found.versions = listings.versions  # type: ignore[method-assign]
    return found, listings


@pytest.mark.parametrize("version", [3, 4])
def test_a_version_is_seen_soon_after_it_appears(tmp_path: Path, clock: Clock, version: int) -> None:
    """Or a newer one."""
    found, listings = waiting(tmp_path, clock, {0.0: 2, 3.1: version})
    assert found.wait_for(3, timeout_s=60.0)
    assert 103.1 <= clock.now < 104.0
    assert listings.looks < 50  # a share is not asked all the time


def test_a_version_that_does_not_come_is_waited_for_until_the_timeout(tmp_path: Path, clock: Clock) -> None:
    found, listings = waiting(tmp_path, clock, {0.0: 2})
    assert not found.wait_for(3, timeout_s=10.1)
    assert clock.now == pytest.approx(110.1)
    assert listings.looks < 100


def test_a_version_that_appears_with_the_end_of_the_wait_is_seen(tmp_path: Path, clock: Clock) -> None:
    found, _ = waiting(tmp_path, clock, {10.0: 3})
    assert found.wait_for(3, timeout_s=10.0)


def test_a_version_that_is_there_is_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    found, _ = waiting(tmp_path, clock, {0.0: 3})
    assert found.wait_for(3, timeout_s=0.0)
    assert clock.pauses == []


# -- for a segment


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    """The middle third of a file."""
    (tmp_path / "shard").write_bytes(DATA)
    chunks = tuple(Chunk(at, 100, xxhash.xxh3_128_hexdigest(DATA[at : at + 100])) for at in (200, 300))
    return Segment("shard", 1, 200, 200, chunks)


Preadv = Callable[[int, list[memoryview], int], int]


def answers(monkeypatch: pytest.MonkeyPatch, *each: int | Preadv) -> list[int]:
    """Reads of a file give these errors or results, one after the other, and then what is there; offsets asked for."""
    real, asked = os.preadv, list[int]()

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(offset)
        answer = each[len(asked) - 1] if len(asked) <= len(each) else real
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return asked


def few(fd: int, buffers: list[memoryview], offset: int) -> int:
    data = os.pread(fd, 70, offset)
    buffers[0][: len(data)] = data
    return len(data)


def nothing(fd: int, buffers: list[memoryview], offset: int) -> int:
    return 0


def other(fd: int, buffers: list[memoryview], offset: int) -> int:
    buffers[0][:] = bytes(len(buffers[0]))
    return len(buffers[0])


def test_a_segment_is_read_in_as_many_pieces_as_the_share_gives(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    asked = answers(monkeypatch, few, few)
    reader, into = ShareReader(Pace()), bytearray(300)
    reader.read(tmp_path, segment, memoryview(into))
    assert into == DATA[200:400] + bytes(100)
    assert asked == [200, 270, 340]
    assert (reader.bytes_read, reader.retries, clock.pauses) == (200, 0, [])


@pytest.mark.parametrize(
    "first",
    [errno.ESTALE, errno.EIO, nothing, other],
    ids=["stale handle", "error of the disk", "short", "stale page"],
)
def test_what_passes_is_read_again(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch, clock: Clock, first: int | Preadv
) -> None:
    answers(monkeypatch, first)
    reader, into = ShareReader(Pace()), bytearray(200)
    reader.read(tmp_path, segment, memoryview(into))
    assert into == DATA[200:400]
    assert reader.retries == len(clock.pauses) == 1
    assert reader.bytes_read == (400 if first is other else 200)


@pytest.mark.parametrize(
    ("error", "looked"),
    [(errno.ESTALE, True), (errno.ENOENT, True), (errno.EIO, False)],
    ids=["stale handle", "no entry", "error of the disk"],
)
def test_names_that_a_cache_may_hold_are_looked_up_again(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch, clock: Clock, *, error: int, looked: bool
) -> None:
    seen = list[Path]()
    monkeypatch.setattr(share, "exists_uncached", seen.append)
    answers(monkeypatch, error)
    ShareReader(Pace()).read(tmp_path, segment, memoryview(bytearray(200)))
    assert seen == ([tmp_path, tmp_path / segment.file] if looked else [])


@pytest.mark.parametrize(
    ("error", "attempts", "message"),
    [
        (errno.ESTALE, 6, "it cannot be read: Stale file handle"),
        (errno.EIO, 2, "it cannot be read: Input/output error"),
        (errno.EACCES, 1, "it cannot be read: Permission denied"),
        (nothing, 6, "it ends at byte 200, the manifest says otherwise"),
        (other, 6, r"it does not have the content that the manifest says \(at byte 200\)"),
    ],
)
def test_what_stays_is_an_error_after_pauses_that_grow(
    tmp_path: Path,
    segment: Segment,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    *,
    error: int | Preadv,
    attempts: int,
    message: str,
) -> None:
    asked = answers(monkeypatch, *[error] * 10)
    reader = ShareReader(Pace())
    with pytest.raises(HandoffError, match=rf"shard: {message} \(attempt {attempts}; given up\)"):
        reader.read(tmp_path, segment, memoryview(bytearray(200)))
    assert len(asked) == attempts
    assert reader.retries == len(clock.pauses) == attempts - 1
    assert clock.pauses == sorted(set(clock.pauses))
    assert attempts < 6 or 1.0 < sum(clock.pauses) < 4.0


def test_a_name_that_comes_is_read(tmp_path: Path, segment: Segment, clock: Clock) -> None:
    """A version that the collector is restoring, or that a cache remembers not to be there."""
    there, hidden = tmp_path / "shard", tmp_path / "hidden"
    there.rename(hidden)
    sleep = clock.sleep

    def and_it_comes(seconds: float) -> None:
        sleep(seconds)
        if len(clock.pauses) == 3:
            hidden.rename(there)

    clock.sleep = and_it_comes  # type: ignore[method-assign]
    into = bytearray(200)
    ShareReader(Pace()).read(tmp_path, segment, memoryview(into))
    assert into == DATA[200:400]
    assert len(clock.pauses) == 3


def test_a_name_that_does_not_come_is_an_error(tmp_path: Path, segment: Segment, clock: Clock) -> None:
    (tmp_path / "shard").unlink()
    with pytest.raises(HandoffError, match=r"No such file or directory \(attempt 6; given up\)"):
        ShareReader(Pace()).read(tmp_path, segment, memoryview(bytearray(200)))


@pytest.mark.parametrize(("seconds", "attempts"), [(0.01, 2), (0.2, 4)])
def test_no_attempt_begins_behind_the_time_that_reading_may_take(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch, clock: Clock, *, seconds: float, attempts: int
) -> None:
    """Half of it is the floor, half is for 200 bytes."""
    answers(monkeypatch, *[errno.ESTALE] * 10)
    pace = Pace(floor_s=seconds / 2, bytes_per_s=400 / seconds)
    assert pace.limit_s(200) == pytest.approx(seconds)
    with pytest.raises(HandoffError, match=rf"attempt {attempts}; given up"):
        ShareReader(pace).read(tmp_path, segment, memoryview(bytearray(200)))


def test_what_is_not_to_be_verified_is_taken_as_it_is(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    answers(monkeypatch, other)
    into = bytearray(b"x" * 200)
    ShareReader(Pace()).read(tmp_path, segment, memoryview(into), verify=False)
    assert into == bytes(200)


def test_small_files_are_read_again_after_pauses_that_grow(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_bytes(b"{}")

    def refuse(path: Path) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(HandoffError, match=r"manifest\.json cannot be read: Stale file handle"):
        read_small(tmp_path / "manifest.json")
    assert len(clock.pauses) == 5
    assert clock.pauses == sorted(set(clock.pauses))
    assert 1.0 < sum(clock.pauses) < 4.0
