"""An engine keeps what it serves where nothing newer can be had, also where others cannot have that any more."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from delta_helpers import model, publish_bf16

from hpcrl.inference.embedded.weights.updates import ReaderConfig, Update, UpdateSession
from hpcrl.modeling.decoder import Decoder
from hpcrl.weights import HandoffStore
from hpcrl.weights.read.subscriber import ReaderSettings
from hpcrl.weights.session import SessionOwner


@pytest.fixture
def store(tmp_path: Path) -> HandoffStore:
    """Versions 0 and 1 are whole, 2 is damaged."""
    store = HandoffStore(tmp_path / "weights")
    for version in range(3):
        publish_bf16(store, version, model(version + 5), tmp_path)
    shard = store.open(2).shards[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    return store


@pytest.fixture
def updater(store: HandoffStore) -> Iterator[UpdateSession]:
    updater = UpdateSession(model(1), ReaderConfig(store.root, "engine-0", ReaderSettings()))
    updater.init()
    yield updater
    updater.shutdown()


def load(updater: UpdateSession, store: HandoffStore, version: int, owner: SessionOwner | None) -> Update:
    models: list[Decoder] = []

    def exchange(new: Decoder, label: str) -> Decoder:
        models.append(new)
        return model(1)

    updater.start(owner)
    update = updater.update({"path": str(store.path_of(version)), "fallback": True}, owner)
    updater.finish(exchange, str(update.version), owner)
    assert len(models) == update.loaded
    return update


def test_a_served_version_that_is_gone_is_kept_within_an_attempt(store: HandoffStore, updater: UpdateSession) -> None:
    assert load(updater, store, 1, SessionOwner(1, 1)).loaded
    shutil.rmtree(store.path_of(1))
    update = load(updater, store, 2, SessionOwner(1, 2))
    assert (update.version, update.loaded) == (1, False)
    assert [skipped.version for skipped in update.skipped] == [2]
    assert updater.served_version == 1


@pytest.mark.parametrize("owner", [SessionOwner(2, 1), None])
def test_the_version_of_another_attempt_is_not_kept(
    store: HandoffStore, updater: UpdateSession, owner: SessionOwner | None
) -> None:
    """It may be another version of that number."""
    load(updater, store, 1, SessionOwner(1, 1) if owner else None)
    shutil.rmtree(store.path_of(1))
    update = load(updater, store, 2, owner)
    assert (update.version, update.loaded) == (0, True)


def test_an_older_version_that_is_asked_for_is_loaded(store: HandoffStore, updater: UpdateSession) -> None:
    load(updater, store, 1, SessionOwner(1, 1))
    update = load(updater, store, 0, SessionOwner(1, 2))
    assert (update.version, update.loaded) == (0, True)
