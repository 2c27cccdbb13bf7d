"""What a node's cache holds, in which order it makes room, and when a process reads for itself instead."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from handoff_lab import model_directory, publish

from hpcrl.weights import HandoffStore
from hpcrl.weights.format.segments import Segment, SegmentMap
from hpcrl.weights.read.nodecache import NodeCache
from hpcrl.weights.read.ownership import OwnerLock, current_owner
from hpcrl.weights.read.segment_memory import SegmentMemory


class Lab:
    """Segments of one tensor each, all of one size, and caches for them."""

    def __init__(self, tmp_path: Path) -> None:
        self.store, self.base = HandoffStore(tmp_path / "weights"), tmp_path / "node"
        publish(self.store, 1, model_directory(tmp_path / "model"), tensors=6, words=1000, shards=1)
        publish(self.store, 2, model_directory(tmp_path / "model"), tensors=6, words=1000, shards=1)
        self.segments, self.others = (SegmentMap(self.store.open(version), 8000) for version in (1, 2))
        #: those of tensors, by their numbers; before them is the head of the file
        self.tensors, self.other_tensors = self.segments.in_order[1:], self.others.in_order[1:]
        self.loaded: list[int] = []
        self.limit_s = 10.0

    def cache(self, room: float = 100.0, **how: Any) -> NodeCache:
        """For so many segments."""
        return NodeCache(
            self.base,
            self.store.root,
            secret="5" * 64,
            limit_bytes=int(room * 8000),
            segment_limit_s=lambda size: self.limit_s,
            **how,
        )

    def load(self, segment: Segment, segments: SegmentMap | None = None) -> Callable[[SegmentMemory], None]:
        segments = segments or self.segments

        def load(into: SegmentMemory) -> None:
            self.loaded.append(segments.number(segment) - 1)
            with (segments.handoff.path / segment.file).open("rb") as stream:
                stream.seek(segment.offset)
                assert stream.readinto(into.room()) == segment.bytes

        return load

    def content(self, segment: Segment) -> bytes:
        data = (self.segments.handoff.path / segment.file).read_bytes()
        return data[segment.offset : segment.offset + segment.bytes]

    def get(self, cache: NodeCache, number: int, **how: Any) -> memoryview:
        segment = self.tensors[number]
        found = cache.get(self.segments, segment, self.load(segment), **how)
        assert found == self.content(segment)
        return found

    def get_privately(self, cache: NodeCache, number: int) -> None:
        """Get a segment that the cache does not take, however long it is asked."""
        before, self.limit_s = cache.private_bytes, 0.02
        self.get(cache, number)
        self.limit_s = 10.0
        assert cache.private_bytes == before + 8000

    def file(self, cache: NodeCache, number: int) -> Path:
        segment = self.tensors[number]
        return cache.directory / self.segments.key / segment.file / str(segment.part)

    def held(self, cache: NodeCache) -> list[int]:
        """Segments that are in the cache."""
        return [number for number in range(6) if self.file(cache, number).exists()]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = Lab(tmp_path)
    assert [segment.bytes for segment in lab.tensors] == [8000] * 6
    assert lab.segments.in_order[0].bytes < 1000
    return lab


@pytest.fixture
def cache(lab: Lab) -> Iterator[NodeCache]:
    cache = lab.cache()
    yield cache
    cache.close()


def test_a_segment_is_loaded_once_and_mapped_by_all(lab: Lab, cache: NodeCache) -> None:
    second = lab.cache()
    with cache.reading(lab.segments), second.reading(lab.segments):
        for own in (cache, cache, second):
            lab.get(own, 3)
    assert lab.loaded == [3]
    assert cache.private_bytes == second.private_bytes == 0
    assert stat.S_IMODE(lab.file(cache, 3).stat().st_mode) == 0o400
    second.close()


def test_a_view_is_of_its_process_alone(lab: Lab, cache: NodeCache) -> None:
    view = lab.get(cache, 0)
    view[:4] = b"mine"
    assert lab.get(cache, 0)[:4] != b"mine"
    assert lab.file(cache, 0).read_bytes() == lab.content(lab.tensors[0])


def test_a_version_that_is_loaded_stays_until_the_last_has_it(lab: Lab, cache: NodeCache) -> None:
    with cache.reading(lab.segments):
        with cache.reading(lab.segments):
            lab.get(cache, 0)
        cache.drop_others(set())
        assert lab.held(cache) == [0]
    cache.drop_others({lab.segments.key})
    assert lab.held(cache) == [0]
    cache.drop_others({lab.others.key})
    assert not (cache.directory / lab.segments.key).exists()
    lab.get(cache, 0)
    assert lab.loaded == [0, 0]


def test_the_last_to_leave_removes_the_cache(lab: Lab) -> None:
    cache = lab.cache()
    lab.get(cache, 0)
    view = lab.get(cache, 1)
    cache.close()
    assert list(lab.base.iterdir()) == []
    assert view == lab.content(lab.tensors[1])  # what is mapped stays


# -- reading for oneself


def test_a_segment_that_is_larger_than_the_cache_is_read_by_each(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: no room will come."""
    cache = lab.cache(0.9)
    monkeypatch.setattr("hpcrl.weights.read.nodecache.time.sleep", lambda seconds: pytest.fail("it waits"))
    for times in (1, 2):
        lab.get(cache, 0)
        assert (len(lab.loaded), cache.private_bytes) == (times, times * 8000)
    assert lab.held(cache) == []
    exact = lab.cache(1.0)
    lab.get(exact, 0)
    assert (lab.held(exact), exact.private_bytes) == ([0], 0)
    exact.close()
    cache.close()


def test_an_error_of_loading_is_raised_and_leaves_nothing(lab: Lab, cache: NodeCache) -> None:
    segment = lab.tensors[2]

    def fails(into: SegmentMemory) -> None:
        into.room()[:4] = b"half"
        raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        cache.get(lab.segments, segment, fails)
    assert [path.name for path in lab.file(cache, 2).parent.iterdir()] == []
    lab.get(cache, 2)
    assert lab.held(cache) == [2]


def test_what_another_loads_is_waited_for_no_longer_than_it_may_take(lab: Lab) -> None:
    cache = lab.cache()
    path = lab.file(cache, 0)
    path.parent.mkdir(parents=True)
    other = OwnerLock(path.with_name(f"{path.name}.lock"))
    assert other.acquire()
    lab.get_privately(cache, 0)
    assert (cache.private_bytes, lab.held(cache)) == (8000, [])
    with pytest.raises(CancelledError):
        lab.get(cache, 0, stopped=lambda: True)
    other.release()
    lab.get(cache, 0, stopped=lambda: True)  # there is nothing to wait for
    assert (cache.private_bytes, lab.held(cache)) == (8000, [0])
    cache.close()


def test_a_cache_that_cannot_be_used_is_not_an_error(
    lab: Lab, cache: NodeCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    lab.get(cache, 0)
    assert cache.private_bytes == 8000
    assert "cannot be used: [Errno 28]" in caplog.text


# -- room


def test_what_all_have_seen_goes_first(lab: Lab) -> None:
    """In order; and the cache is never larger than it may be."""
    cache = lab.cache(2.5)
    with cache.reading(lab.segments):
        for number in range(6):
            cache.advance(lab.segments, 1 + number)
            lab.get(cache, number)
            assert lab.held(cache) == [each for each in (number - 1, number) if each >= 0]
    assert (lab.loaded, cache.private_bytes) == (list(range(6)), 0)
    cache.close()


def test_a_version_that_is_no_longer_loaded_makes_room(lab: Lab) -> None:
    cache = lab.cache(2.5)
    with cache.reading(lab.others):
        for segment in lab.other_tensors[:2]:
            cache.get(lab.others, segment, lab.load(segment, lab.others))
    with cache.reading(lab.segments):
        lab.get(cache, 0)
        lab.get(cache, 1)
    assert cache.private_bytes == 0
    files = [path for path in cache.directory.rglob("*") if path.name.isdecimal()]
    assert sum(path.stat().st_size for path in files) <= 2.5 * 8000
    assert lab.file(cache, 1) in files
    cache.close()


def test_read_ahead_is_limited_by_the_size_of_the_cache(lab: Lab) -> None:
    cache = lab.cache(2.5)
    with cache.reading(lab.segments):
        lab.get(cache, 0), lab.get(cache, 1)
        assert cache.private_bytes == 0
        lab.get_privately(cache, 2)
        lab.get_privately(cache, 5)
        assert lab.held(cache) == [0, 1]
        cache.advance(lab.segments, 1 + 4)
        lab.get(cache, 5)
        lab.get(cache, 4)
        assert (lab.held(cache), cache.private_bytes) == ([4, 5], 16000)
    cache.close()


def test_who_waits_for_room_can_be_stopped(lab: Lab) -> None:
    cache = lab.cache(2.5)
    with cache.reading(lab.segments), pytest.raises(CancelledError):
        lab.get(cache, 5, stopped=lambda: True)
    assert lab.loaded == []
    cache.close()


# -- for other nodes


def test_a_segment_for_another_node_is_a_file(lab: Lab, cache: NodeCache) -> None:
    segment = lab.tensors[4]
    for _ in range(2):
        path = cache.file_of(lab.segments, segment, lab.load(segment))
        assert path is not None
        assert path.read_bytes() == lab.content(segment)
    assert lab.loaded == [4]
    small = lab.cache(0.5)
    assert small.file_of(lab.segments, lab.tensors[0], lab.load(lab.tensors[0])) is None
    small.close()


def test_what_is_not_to_be_verified_is_taken_as_it_lies(lab: Lab) -> None:
    first, second = lab.cache(), lab.cache(verify=False)
    lab.get(first, 0)
    path = lab.file(first, 0)
    path.chmod(0o600)
    path.write_bytes(bytes(8000))
    path.chmod(0o400)
    segment = lab.tensors[0]
    assert second.get(lab.segments, segment, lab.load(segment)) == bytes(8000)
    first.close(), second.close()


# -- other processes

#: in another container, of which it cannot be seen whether it lives; and one that had this pid before
OTHER = str(current_owner()._replace(namespace="1"))
DEAD = str(current_owner()._replace(start_ticks=current_owner().start_ticks - 1))


def test_a_cache_stays_while_another_uses_it(lab: Lab) -> None:
    cache = lab.cache()
    members = cache.directory / "members"
    assert os.listdir(members) == [str(current_owner())]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache.directory, members)] == [0o700] * 2
    (members / OTHER).touch()
    (members / DEAD).touch()
    lab.get(cache, 0)
    cache.close()
    assert os.listdir(members) == [OTHER]
    again = lab.cache()
    lab.get(again, 0)
    assert lab.loaded == [0]
    (members / OTHER).unlink()
    again.close()
    assert not cache.directory.exists()


@pytest.mark.parametrize("owner", [OTHER, DEAD], ids=["alive", "dead"])
def test_a_version_that_another_loads_stays(lab: Lab, cache: NodeCache, owner: str) -> None:
    lab.get(cache, 0)
    (cache.directory / lab.segments.key / f".reading-{owner}").write_text("0")
    cache.drop_others(set())
    assert lab.held(cache) == ([0] if owner == OTHER else [])


@pytest.mark.parametrize("text", ["0", "torn", ""])
def test_the_slowest_reader_is_waited_for(lab: Lab, text: str) -> None:
    """One that cannot be understood is at the beginning."""
    cache = lab.cache(2.5)
    with cache.reading(lab.segments):
        mark = cache.directory / lab.segments.key / f".reading-{OTHER}"
        mark.write_text(text)
        lab.get(cache, 0), lab.get(cache, 1)
        cache.advance(lab.segments, 1 + 2)
        lab.get_privately(cache, 2)
        assert (lab.held(cache), cache.private_bytes) == ([0, 1], 8000)
        mark.write_text("2")  # it has come as far as the second tensor, and has seen the first
        lab.file(cache, 0).with_name(f"{lab.file(cache, 0).name}.seen-{OTHER}").touch()
        lab.get(cache, 2)
        assert (lab.held(cache), cache.private_bytes) == ([1, 2], 8000)
    cache.close()


@pytest.mark.parametrize("owner", [OTHER, DEAD], ids=["alive", "dead"])
def test_what_the_dead_have_half_loaded_is_removed(lab: Lab, cache: NodeCache, owner: str) -> None:
    path = lab.file(cache, 0)
    path.parent.mkdir(parents=True)
    half = path.with_name(f".{path.name}.loading")
    half.write_bytes(b"half")
    path.with_name(f"{path.name}.lock.1").write_text(owner)
    lab.cache()
    assert half.exists() is (owner == OTHER)


def test_caches_that_the_dead_have_left_are_removed(lab: Lab) -> None:
    name = f"hpcrl-weights-{os.getuid()}"
    for directory, member in (
        (f"{name}-0", DEAD),
        (f"{name}-1", OTHER),
        (f".removed-{name}-2", OTHER),
        ("other", DEAD),
    ):
        (lab.base / directory / "members").mkdir(parents=True)
        (lab.base / directory).chmod(0o700)
        (lab.base / directory / "members" / member).touch()
    cache = lab.cache()
    assert sorted(os.listdir(lab.base)) == sorted([cache.directory.name, f"{name}-1", "other"])
    cache.close()
