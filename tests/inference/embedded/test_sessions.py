"""A weight update that is cut between its steps, and sessions that nobody ends: weights and label stay one thing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from delta_helpers import model, publish_bf16
from engine_helpers import tensors_of
from patience import patience, wait_for

from hpcrl.errors import HandoffError
from hpcrl.inference.embedded.weights.sessions import UpdateOrderError
from hpcrl.inference.embedded.weights.updates import ReaderConfig, UpdateSession
from hpcrl.modeling.decoder import Decoder
from hpcrl.weights import HandoffStore
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber
from hpcrl.weights.session import SessionOwner

FIRST, SECOND = SessionOwner(1, 10), SessionOwner(1, 11)


class Served:
    """An engine: what runs, and what that is called; both change in `exchange` alone."""

    def __init__(self, root: Path, reader: str | None = None) -> None:
        self.model, self.label = model(1), "start"
        self.updater = UpdateSession(self.model, ReaderConfig(root, reader, ReaderSettings()))
        self.updater.init()
        self.stands = threading.Event()
        self.stands.set()
        self.asked = threading.Event()

    def exchange(self, new: Decoder, label: str) -> Decoder:
        self.asked.set()
        assert self.stands.wait(60)
        old, self.model, self.label = self.model, new, label
        return old

    def has(self, expected: Decoder) -> bool:
        wanted = tensors_of(expected)
        return all(torch.equal(tensor, wanted[name]) for name, tensor in tensors_of(self.model).items())

    def read(self, store: HandoffStore, version: int, owner: SessionOwner | None = None) -> None:
        self.updater.start(owner)
        self.updater.update({"path": str(store.path_of(version))}, owner)

    def update(self, store: HandoffStore, version: int, owner: SessionOwner | None = None) -> None:
        self.read(store, version, owner)
        self.updater.finish(self.exchange, str(version), owner)


@pytest.fixture
def store(tmp_path: Path) -> HandoffStore:
    store = HandoffStore(tmp_path / "weights")
    for version in (1, 2):
        publish_bf16(store, version, model(10 + version), tmp_path)
    return store


@pytest.fixture
def served(store: HandoffStore) -> Iterator[Served]:
    served = Served(store.root)
    yield served
    served.stands.set()
    served.updater.shutdown()


@pytest.fixture
def caller() -> Iterator[ThreadPoolExecutor]:
    """Calls whose caller gives up: nobody looks at their results."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_an_abandoned_finish_is_complete_before_the_next_update(
    served: Served, store: HandoffStore, caller: ThreadPoolExecutor
) -> None:
    """Its exchange is late; the retry finds what it has served, and label and weights are of one version."""
    served.update(store, 1)
    served.stands.clear()
    served.asked.clear()
    served.read(store, 2, FIRST)
    given_up = caller.submit(served.updater.finish, served.exchange, "2", FIRST)
    assert served.asked.wait(60)
    served.updater.start(SECOND)
    retry = caller.submit(served.updater.update, {"path": str(store.path_of(2))}, SECOND)
    assert (served.label, served.has(model(11))) == ("1", True)  # nothing of it is there, neither label nor weights
    served.stands.set()
    given_up.result(60)
    assert retry.result(60).loaded is False
    served.updater.finish(served.exchange, "2", SECOND)
    assert (served.label, served.has(model(12))) == ("2", True)


def test_an_exchange_that_fails_is_made_by_the_next_update(served: Served, store: HandoffStore) -> None:
    def fail(new: Decoder, label: str) -> Decoder:
        raise RuntimeError("the model thread has failed")

    served.update(store, 1)
    served.read(store, 2)
    with pytest.raises(RuntimeError, match="model thread"):
        served.updater.finish(fail, "2")
    assert served.updater.served_version == 1
    served.update(store, 2)
    assert (served.label, served.has(model(12))) == ("2", True)


def test_a_share_that_hangs_after_the_exchange_leaves_what_is_served(
    served: Served, store: HandoffStore, caller: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To acknowledge a version is a write to the share; the retry must not wait for it, nor find the old weights."""
    hangs, back = threading.Event(), threading.Event()
    acknowledged: list[int] = []

    def acknowledge(self: Subscriber, version: int) -> None:
        hangs.set()
        assert back.wait(60)
        acknowledged.append(version)

    monkeypatch.setattr(Subscriber, "acknowledge", acknowledge)
    registered = Served(store.root, "engine-0")
    registered.read(store, 2)
    given_up = caller.submit(registered.updater.finish, registered.exchange, "2")
    assert hangs.wait(60)
    registered.updater.start(SECOND)
    assert registered.updater.update({"path": str(store.path_of(2))}, SECOND).loaded is False
    assert (registered.label, registered.has(model(12))) == ("2", True)
    back.set()
    given_up.result(60)
    registered.updater.finish(registered.exchange, "2", SECOND)
    assert acknowledged == [2]
    registered.updater.shutdown()


@pytest.mark.parametrize("label", ["1", "3", "02", "two", ""])
def test_a_label_names_what_was_read(served: Served, store: HandoffStore, label: str) -> None:
    served.update(store, 1)
    served.read(store, 2)
    with pytest.raises(UpdateOrderError, match="names other weights"):
        served.updater.finish(served.exchange, label)
    assert (served.label, served.has(model(11))) == ("1", True)


@pytest.mark.parametrize("label", ["1", "2"])
def test_without_new_weights_there_is_no_new_label(served: Served, store: HandoffStore, label: str) -> None:
    served.updater.start()
    with pytest.raises(UpdateOrderError, match="the start model"):
        served.updater.finish(served.exchange, label)
    assert served.label == "start"


def test_the_next_session_ends_an_open_one(served: Served, store: HandoffStore) -> None:
    served.read(store, 1, FIRST)
    served.update(store, 2, SECOND)
    assert (served.label, served.has(model(12))) == ("2", True)
    with pytest.raises(UpdateOrderError, match="call /start_weight_update"):
        served.updater.finish(served.exchange, "1", FIRST)


def test_calls_of_another_session_are_refused(served: Served, store: HandoffStore) -> None:
    served.read(store, 1, FIRST)
    served.updater.start(SECOND)
    for late in (FIRST, None):
        with pytest.raises(UpdateOrderError, match=r"while session 1\.11 is open"):
            served.updater.update({"path": str(store.path_of(1))}, late)
        with pytest.raises(UpdateOrderError, match=r"while session 1\.11 is open"):
            served.updater.finish(served.exchange, "1", late)
    with pytest.raises(UpdateOrderError, match="older"):
        served.updater.start(FIRST)
    served.updater.update({"path": str(store.path_of(2))}, SECOND)
    served.updater.finish(served.exchange, "2", SECOND)
    assert (served.label, served.has(model(12))) == ("2", True)


def test_a_read_that_hangs_keeps_no_session_from_beginning(
    served: Served, store: HandoffStore, caller: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next session begins at once; its own read waits for the share, and for the old one to let go."""
    hangs, back = threading.Event(), threading.Event()
    load_segment = Subscriber.load_segment

    def hanging(self: Subscriber, *args: object) -> None:
        hangs.set()
        assert back.wait(60)
        load_segment(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Subscriber, "load_segment", hanging)
    served.updater.start(FIRST)
    given_up = caller.submit(served.updater.update, {"path": str(store.path_of(1))}, FIRST)
    assert hangs.wait(60)
    served.updater.init()
    served.updater.start(SECOND)
    late = caller.submit(served.updater.update, {"path": str(store.path_of(2))}, SECOND)
    back.set()
    with pytest.raises(UpdateOrderError, match=r"session 1\.10 has ended"):
        given_up.result(60)
    assert late.result(60).version == 2
    served.updater.finish(served.exchange, "2", SECOND)
    assert (served.label, served.has(model(12))) == ("2", True)


def test_a_read_without_readers_ends(
    served: Served, store: HandoffStore, caller: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, back = threading.Event(), threading.Event()
    load_segment = Subscriber.load_segment

    def hanging(self: Subscriber, *args: object) -> None:
        hangs.set()
        assert back.wait(60)
        load_segment(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Subscriber, "load_segment", hanging)
    served.updater.start(FIRST)
    given_up = caller.submit(served.updater.update, {"path": str(store.path_of(1))}, FIRST)
    assert hangs.wait(60)
    served.updater.abandon(SECOND)  # of somebody else: nothing happens
    served.updater.abandon(FIRST)
    back.set()
    wait_for(given_up.done, 10 * patience(), "the read to end")
    assert isinstance(given_up.exception(), UpdateOrderError)
    assert served.label == "start"


def test_a_version_that_is_damaged_ends_its_session_alone(served: Served, store: HandoffStore) -> None:
    served.updater.start(FIRST)
    with pytest.raises(HandoffError):
        served.updater.update({"path": str(store.path_of(99))}, FIRST)
    with pytest.raises(UpdateOrderError):
        served.updater.finish(served.exchange, None, FIRST)
    served.update(store, 2, SECOND)
    assert (served.label, served.has(model(12))) == ("2", True)
