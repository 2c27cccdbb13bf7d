"""Which versions go, however a collector finds a store: chains of deltas, changes meanwhile, and failures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handoff_lab import check_content, model_directory, publish, publish_delta

from hpcrl.errors import HandoffError
from hpcrl.weights import HandoffStore
from hpcrl.weights.lifetime import collector as collectors
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.pins import handoff_pins
from hpcrl.weights.lifetime.readers import Registration
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

LONG_S = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> HandoffStore:
    """Two whole versions, of which each is followed by two deltas."""
    store, model = HandoffStore(tmp_path / "weights"), model_directory(tmp_path / "model")
    publish(store, 1, model, words=10)
    publish_delta(store, 2, (1,), model, words=10)
    publish_delta(store, 3, (1, 2), model, words=10)
    publish(store, 4, model, words=10)
    publish_delta(store, 5, (4,), model, words=10)
    publish_delta(store, 6, (4, 5), model, words=10)
    return store


def collector(store: HandoffStore, keep_last: int = 1, **how: Any) -> Collector:
    return Collector(store, ReaderWatch(store.root, expiry_s=60.0), **{"keep_last": keep_last, "settle_s": 0.0, **how})


def left(store: HandoffStore) -> list[str]:
    """What lies in the store beside readers and the writer."""
    return sorted(name for name in os.listdir(store.root) if not name.startswith((".readers", ".writer")))


def test_what_a_delta_needs_stays_with_it(store: HandoffStore) -> None:
    one = collector(store)
    assert one.plan() == {
        1: "",
        2: "",
        3: "",
        4: "needed to reconstruct version 6",
        5: "needed to reconstruct version 6",
        6: "one of the newest 1",
    }
    assert store.versions() == [1, 2, 3, 4, 5, 6]  # nothing is changed
    report = one.collect()
    assert (report.removed, report.restored) == ([1, 2, 3], [])
    assert list(report.kept) == [4, 5, 6]
    assert left(store) == ["v000004", "v000005", "v000006"]
    with Subscriber(store.root, None, ReaderSettings()) as reader, reader.reading(6) as reading:
        check_content(reading)


@pytest.mark.parametrize(("keep_last", "removed"), [(0, [1, 2, 3, 4, 5, 6]), (1, [1, 2, 3]), (3, [1, 2, 3]), (4, [])])
def test_the_newest_stay_with_what_they_need(store: HandoffStore, keep_last: int, removed: list[int]) -> None:
    assert collector(store, keep_last).collect().removed == removed


def test_a_version_is_held_for_one_reason_and_the_first_is_reported(store: HandoffStore) -> None:
    handoff_pins(store.root).add(3, reason="paper", by="ann")
    with (
        Registration(store.root, "b", expiry_s=LONG_S) as second,
        Registration(store.root, "a", expiry_s=LONG_S) as first,
    ):
        first.acknowledge(3)
        second.acknowledge(2)
        second.lease([2, 1])
        first.lease([6, 9])  # one that is not there is nothing to keep
        reasons = collector(store).plan(in_use=[1, 2, 4])
    assert reasons == {
        1: "leased by b",
        2: "served by b",
        3: "pinned by ann: paper",
        4: "in use by an engine",
        5: "needed to reconstruct version 6",
        6: "leased by a",
    }


def test_an_unreadable_version_needs_nothing_and_is_none_of_the_newest(
    store: HandoffStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = store.path_of(6) / "manifest.json"
    path.write_text(path.read_text().replace('"version": 6', '"version": 7').replace('"version":6', '"version":7'))
    report = collector(store).collect()
    assert report.removed == [1, 2, 3, 6]
    assert report.kept == {4: "needed to reconstruct version 5", 5: "one of the newest 1"}
    assert "version 6 is unreadable, so it needs nothing" in caplog.text


def test_where_it_is_not_known_what_a_version_needs_nothing_goes(store: HandoffStore) -> None:
    (store.path_of(6) / "manifest.json").unlink()
    with pytest.raises(HandoffError, match="version 6 stays, but what it needs is unknown, so nothing is removed"):
        collector(store).collect()
    assert left(store) == [f"v00000{version}" for version in range(1, 7)]


def test_a_version_that_is_published_anew_is_checked_anew(store: HandoffStore, tmp_path: Path) -> None:
    one = collector(store)
    assert one.plan()[4] == "needed to reconstruct version 6"
    store_path = store.path_of(6)
    os.rename(store_path, tmp_path / "away")
    publish(store, 6, tmp_path / "model", words=10)
    assert one.collect().removed == [1, 2, 3, 4, 5]


# -- while versions are hidden


def while_hidden(store: HandoffStore, action: Callable[[], object], **how: Any) -> tuple[Collector, list[float]]:
    """A collector that settles while ``action`` happens."""
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert not any(name in ("v000001", "v000002", "v000003") for name in left(store))
        action()

    return collector(store, sleep=sleep, settle_s=1.5, **how), slept


def test_a_lease_that_comes_meanwhile_brings_a_version_back_with_what_it_needs(store: HandoffStore) -> None:
    with Registration(store.root, "r", expiry_s=LONG_S) as reader:
        one, slept = while_hidden(store, lambda: reader.lease([2]))
        report = one.collect()
    assert slept == [1.5]
    assert (report.restored, report.removed) == ([1, 2], [3])
    assert report.kept[1] == report.kept[2] == "leased or pinned while it was being removed"
    assert list(report.kept) == [1, 2, 4, 5, 6]
    assert left(store) == [f"v00000{version}" for version in (1, 2, 4, 5, 6)]


def test_a_pin_that_comes_meanwhile_counts(store: HandoffStore) -> None:
    one, _ = while_hidden(store, lambda: handoff_pins(store.root).add(1, reason="", by="ann"))
    assert (one.collect().restored, store.versions()) == ([1], [1, 4, 5, 6])


def test_a_version_that_is_published_meanwhile_keeps_what_it_needs(store: HandoffStore, tmp_path: Path) -> None:
    """Its publisher has looked for its parents before they were hidden."""
    publish_delta(store, 7, (1, 2), tmp_path / "model", words=10)
    path, staged = store.path_of(7), tmp_path / "staged"
    os.rename(path, staged)
    one, _ = while_hidden(store, lambda: os.rename(staged, path))
    report = one.collect()
    assert (report.restored, report.removed) == ([1, 2], [3])


def test_what_is_in_use_counts_also_while_it_is_hidden(store: HandoffStore) -> None:
    os.rename(store.path_of(2), store.root / ".hidden-v000002")  # by a collector that died
    report = collector(store).collect(in_use=[2])
    assert (report.restored, 2 in store.versions()) == ([1, 2], True)


def test_where_leases_cannot_be_read_what_was_hidden_comes_back(store: HandoffStore) -> None:
    def tear() -> None:
        (store.root / ".readers").mkdir(exist_ok=True)
        (store.root / ".readers" / "r.0123456789ab~00000000.json").write_text("{")

    one, _ = while_hidden(store, tear)
    with pytest.raises(HandoffError, match=r"r\.0123456789ab"):
        one.collect()
    assert store.versions() == [1, 2, 3, 4, 5, 6]


def test_where_nothing_goes_nothing_is_waited_for(store: HandoffStore) -> None:
    one, slept = while_hidden(store, lambda: None, keep_last=6)
    assert (one.collect().removed, slept) == ([], [])


def test_a_filesystem_that_refuses_ends_a_pass_and_the_next_continues(
    store: HandoffStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(collectors.lost_replies, "rename", refuse)
        with pytest.raises(HandoffError, match=r"nothing else is removed now: .*Input/output error"):
            collector(store).collect()
    assert store.versions() == [1, 2, 3, 4, 5, 6]
    assert collector(store).collect().removed == [1, 2, 3]


def test_what_a_dead_collector_was_deleting_is_deleted(store: HandoffStore) -> None:
    os.rename(store.path_of(1), store.root / ".removed-v000001-01234567")
    collector(store, keep_last=6).collect()
    assert left(store) == [f"v00000{version}" for version in range(2, 7)]


def test_what_was_put_aside_goes_when_it_is_published_again(store: HandoffStore) -> None:
    for version in (5, 7):
        aside = store.root / "put-aside" / "000001" / f"v00000{version}"
        aside.mkdir(parents=True)
    collector(store, keep_last=6).collect()
    assert [path.name for path in store.root.glob("put-aside/*/*")] == ["v000007"]


def test_an_empty_store_has_nothing_to_remove(tmp_path: Path) -> None:
    report = collector(HandoffStore(tmp_path / "none")).collect()
    assert report == ([], {}, [])
