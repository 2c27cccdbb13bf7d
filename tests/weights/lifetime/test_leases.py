"""Readers, leases and the collector: who is there, who lives, and what may go."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from handoff_lab import check_content, model_directory, publish

from hpcrl.errors import HandoffError
from hpcrl.weights import HandoffStore
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.pins import handoff_pins
from hpcrl.weights.lifetime.readers import Registration, parse_name
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

LONG_S = 3600.0


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> HandoffStore:
    store, model = HandoffStore(tmp_path / "weights"), model_directory(tmp_path / "model")
    for version in range(6):
        publish(store, version, model)
    return store


def collector(store: HandoffStore, *, keep_last: int = 2, clock: Clock | None = None) -> Collector:
    watch = ReaderWatch(store.root, expiry_s=60.0, clock=clock or Clock())
    return Collector(store, watch, keep_last=keep_last, settle_s=0.0)


def test_a_record_says_what_its_reader_holds(store: HandoffStore) -> None:
    watch = ReaderWatch(store.root, expiry_s=60.0)
    assert watch.observe() == []
    assert watch.acknowledged_version() is None
    with (
        Registration(store.root, "engine-0", expiry_s=LONG_S, node="a") as first,
        Registration(store.root, "engine-1", expiry_s=LONG_S, node="b") as second,
    ):
        first.acknowledge(4)
        assert watch.acknowledged_version() is None  # the other has nothing yet
        second.lease([2, 3])
        second.lease([3])
        second.release([2, 3])
        second.acknowledge(3)
        first.serve_at("http://127.0.0.1:1")
        one, two = watch.observe()
        assert (one.reader, one.node, one.acknowledged, one.leases, one.url) == (
            *("engine-0", "a", 4),
            (),
            "http://127.0.0.1:1",
        )
        assert (two.reader, two.acknowledged, two.leases) == ("engine-1", 3, (3,))
        assert watch.acknowledged_version() == 3
    assert watch.observe() == []
    assert os.listdir(store.root / ".readers") == []


def test_a_reader_lives_while_its_names_change_by_the_watchers_clock(store: HandoffStore) -> None:
    clock = Clock()
    watch = ReaderWatch(store.root, expiry_s=60.0, clock=clock)
    alive = Registration(store.root, "alive", expiry_s=0.4).open()
    dead = Registration(store.root, "dead", expiry_s=LONG_S).open()  # its heartbeat never comes in this test
    try:
        dead.acknowledge(1)
        alive.acknowledge(5)
        (store.root / ".readers" / ".half-written.tmp").touch()
        assert [record.reader for record in watch.observe()] == ["alive", "dead"]
        names = set(os.listdir(store.root / ".readers"))
        deadline = time.monotonic() + 20
        while not any(n for n in set(os.listdir(store.root / ".readers")) - names if n.startswith("alive")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        clock.now += 61.0
        assert [record.reader for record in watch.observe()] == ["alive"]
        assert watch.acknowledged_version() == 5
        gone = watch.forget_dead()
        assert ".half-written.tmp" in gone
        assert {parsed.reader for name in gone if (parsed := parse_name(name))} <= {"alive", "dead"}
        assert not [n for n in os.listdir(store.root / ".readers") if n.startswith("dead")]
        dead.acknowledge(2)  # it was only slow: it is back
        assert watch.acknowledged_version() == 2
    finally:
        alive.close()
        dead.close()


def test_an_old_name_does_not_speak_for_a_reader_that_is_just_dying(store: HandoffStore) -> None:
    """Time goes on while names are looked at: all are judged at one moment, and the newest one decides."""
    times = itertools.chain([1000.0], itertools.count(1059.9, 0.02))
    watch = ReaderWatch(store.root, expiry_s=60.0, clock=lambda: next(times))
    with Registration(store.root, "r", expiry_s=LONG_S) as reader:
        for version in range(20):
            reader.acknowledge(version)
        assert [record.acknowledged for record in watch.observe()] == [19]
        seen = [[record.acknowledged for record in watch.observe()] for _ in range(10)]
        assert seen == sorted(seen, reverse=True)
        assert {19} >= {version for records in seen for version in records}
        assert seen[-1] == []


def test_a_restarted_watch_gives_every_reader_its_full_time(store: HandoffStore) -> None:
    with Registration(store.root, "r", expiry_s=LONG_S) as reader:
        reader.lease([0])
        clock = Clock()
        assert 0 in collector(store, clock=clock).collect().kept
        restarted = collector(store, clock=clock)
        clock.now += 59.0
        assert restarted.collect().kept[0] == "leased by r"
        clock.now += 61.0
        assert 0 in restarted.collect().removed


def test_an_unreadable_record_stops_the_collector(store: HandoffStore) -> None:
    directory = store.root / ".readers"
    directory.mkdir()
    (directory / "r.0123456789ab~00000000.json").write_text("{")
    clock = Clock()
    one = collector(store, clock=clock)
    with pytest.raises(HandoffError, match=r"r\.0123456789ab"):
        one.collect()
    assert store.versions() == list(range(6))
    clock.now += 61.0
    assert one.collect().removed == [0, 1, 2, 3]


def test_what_is_kept_and_why(store: HandoffStore) -> None:
    handoff_pins(store.root).add(0, reason="paper", by="ann")
    with Registration(store.root, "engine-0", expiry_s=LONG_S) as reader:
        reader.acknowledge(2)
        report = collector(store).collect(in_use={1})
    assert report.kept == {
        0: "pinned by ann: paper",
        1: "in use by an engine",
        2: "served by engine-0",
        4: "one of the newest 2",
        5: "one of the newest 2",
    }
    assert report.removed == [3]
    assert store.versions() == [0, 1, 2, 4, 5]
    assert handoff_pins(store.root).remove(0)
    assert not handoff_pins(store.root).remove(0)
    assert collector(store).collect().removed == [0, 1, 2]
    assert not [name for name in os.listdir(store.root) if name.startswith((".hidden", ".removed"))]


def test_what_was_loaded_stays_until_it_is_acknowledged(store: HandoffStore) -> None:
    """Between the end of reading and the acknowledgement nothing else says that the version is about to be served."""
    with Subscriber(store.root, "engine-0", ReaderSettings(expiry_s=LONG_S)) as subscriber:
        loaded = subscriber.load_newest(check_content, at_most=1)
        with subscriber.reading(3) as reading:
            check_content(reading)  # and is not kept
        report = collector(store).collect()
        assert (report.kept[1], report.removed) == ("leased by engine-0", [0, 2, 3])
        subscriber.acknowledge(loaded.version)
        assert collector(store).collect().kept[1] == "served by engine-0"
        subscriber.load_newest(check_content)
        subscriber.acknowledge(5)
        assert collector(store).collect().removed == [1]


def steps(store: HandoffStore, version: int, reader: Registration) -> tuple[list[Callable[[], None]], dict[str, bool]]:
    """The steps of both sides: reader L, N; collector H, C, D."""
    one, seen = collector(store, keep_last=1), {}
    wanted: set[int] = set()

    def look() -> None:
        seen["present"] = version in store.versions()

    def read_leases() -> None:
        one._needs.clear()
        wanted.update(one._wanted([version], ()))

    def decide() -> None:
        one._decide([version], wanted)
        one._delete_doomed()

    return [lambda: reader.lease([version]), look, lambda: one._hide(version), read_leases, decide], seen


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("rrccc"))))
def test_no_order_of_steps_deletes_what_a_reader_found(tmp_path: Path, order: tuple[str, ...]) -> None:
    """All ten interleavings of the reader's two steps with the collector's three."""
    store, model = HandoffStore(tmp_path / "weights"), model_directory(tmp_path / "model")
    for version in (1, 2):
        publish(store, version, model)
    with Registration(store.root, "r", expiry_s=LONG_S) as reader:
        todo, seen = steps(store, 1, reader)
        of = {"r": iter(todo[:2]), "c": iter(todo[2:])}
        for side in order:
            next(of[side])()
    if seen["present"]:
        assert store.versions() == [1, 2]
        store.open(1).verify(content=True)
    leased_before_look_at_leases = "".join(order).index("r") < [i for i, s in enumerate(order) if s == "c"][1]
    assert (1 in store.versions()) == leased_before_look_at_leases


def test_readers_and_collector_race_freely(tmp_path: Path) -> None:
    """Threads without any order: a leased version is never taken away while it is read."""
    store, model = HandoffStore(tmp_path / "weights"), model_directory(tmp_path / "model")
    publish(store, 0, model)
    stop, problems, loads = threading.Event(), [], []

    def read(name: str) -> None:
        rng = random.Random(name)
        with Subscriber(store.root, name, ReaderSettings(expiry_s=LONG_S)) as subscriber:
            while not stop.is_set():
                try:
                    version = rng.choice(subscriber.versions())
                    with subscriber.reading(version) as reading:
                        try:
                            loads.append(check_content(reading))
                        except HandoffError as error:
                            problems.append(error)
                except HandoffError:
                    continue  # it was gone before the lease held

    readers = [threading.Thread(target=read, args=(f"r{i}",)) for i in range(3)]
    for thread in readers:
        thread.start()
    one = collector(store, keep_last=1, clock=None)
    for version in range(1, 40):
        publish(store, version, model)
        one.collect()
    stop.set()
    for thread in readers:
        thread.join()
    assert problems == []
    assert len(loads) > 10
    assert one.collect().kept == {39: "one of the newest 1"}


def test_a_collector_that_died_is_followed_by_one_that_decides(store: HandoffStore) -> None:
    dead = collector(store)
    for version in (0, 1, 2):
        dead._hide(version)
    dead._doom(2)
    assert store.versions() == [3, 4, 5]
    with Registration(store.root, "r", expiry_s=LONG_S) as reader:
        reader.lease([1])
        report = collector(store, keep_last=3).collect()
    assert (report.restored, report.removed) == ([1], [0])
    assert store.versions() == [1, 3, 4, 5]
    assert not [name for name in os.listdir(store.root) if name.startswith((".hidden", ".removed"))]


def test_a_version_published_anew_is_not_replaced_by_the_hidden_one(store: HandoffStore, tmp_path: Path) -> None:
    one = collector(store)
    one._hide(3)
    publish(store, 3, model_directory(tmp_path / "model"), words=10)
    with Registration(store.root, "r", expiry_s=LONG_S) as reader:
        reader.lease([3])
        assert one.collect().restored == []
    assert store.open(3).manifest.tensors["t.0"].shape == (10,)
    store.open(3).verify(content=True)
