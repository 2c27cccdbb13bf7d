"""One engine's share in the pool of KV, over a stand-in of Mooncake's client that fails as a test says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.inference.embedded.kv import pool as module
from hpcrl.inference.embedded.kv.pool import KvPool
from hpcrl.inference.embedded.kv.sealing import BlockFormat

FORM = BlockFormat("a layout", 100)
SETTINGS: dict[str, Any] = {
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": 7 << 20,
    "local_buffer_size": 6 * FORM.sealed_bytes + 1,
    "protocol": "tcp",
    "device_name": "eth0",
    "master_server_address": "node-3:5000",
    "tenant_id": "run",
}
BLOCKS = [(bytes([number]) * 16, bytes([number]) * 100) for number in range(8)]
KEYS = [key for key, _ in BLOCKS]
CONTENTS = [content for _, content in BLOCKS]


class DictStore:
    """Objects in a dictionary; what is in ``codes`` and ``withheld`` fails, and calls are noted by their size."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.joined: tuple[Any, ...] = ()
        self.join_code = self.put_code = self.ask_code = 0
        self.withheld: set[str] = set()
        self.puts: list[int] = []
        self.gets: list[int] = []
        self.closed = False

    def setup(self, *arguments: Any, tenant_id: str) -> int:
        self.joined = (*arguments, tenant_id)
        return self.join_code

    def put_batch(self, names: list[str], contents: list[bytes]) -> int:
        self.puts.append(len(names))
        if self.put_code == 0:
            self.objects |= dict(zip(names, contents, strict=True))
        return self.put_code

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [self.ask_code or int(name in self.objects) for name in names]

    def get_batch(self, names: list[str]) -> list[bytes]:
        self.gets.append(len(names))
        return [b"" if name in self.withheld else self.objects.get(name, b"") for name in names]

    def close(self) -> None:
        self.closed = True


class Share:
    """A pool, its failures by kind, and a clock that tests move."""

    def __init__(self, store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.failures, self.now = store, Counter[str](), 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.pool = KvPool(SETTINGS, "10.0.0.7", FORM, failed=self.failed)

    def failed(self, kind: str) -> None:
        self.failures[str(kind)] += 1

    def put(self, blocks: list[tuple[bytes, bytes]] = BLOCKS) -> None:
        self.pool.put_soon(blocks)
        self.pool._putter.submit(lambda: None).result(20)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> DictStore:
    made = DictStore()
    monkeypatch.setattr(module, "load_client", lambda: SimpleNamespace(MooncakeDistributedStore=lambda: made))
    return made


@pytest.fixture
def share(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Share]:
    made = Share(store, monkeypatch)
    yield made
    made.pool.close()
    assert store.closed


def test_an_engine_joins_with_its_settings(share: Share) -> None:
    buffer = SETTINGS["local_buffer_size"]
    assert share.store.joined == ("10.0.0.7", "P2PHANDSHAKE", 7 << 20, buffer, "tcp", "eth0", "node-3:5000", "run")


def test_a_pool_that_cannot_be_joined_is_named(store: DictStore) -> None:
    store.join_code = -5
    with pytest.raises(HpcrlError, match=r"10\.0\.0\.7 cannot join the KV pool at node-3:5000: code -5"):
        KvPool(SETTINGS, "10.0.0.7", FORM, failed=lambda kind: None)


async def test_what_is_put_is_sealed_and_comes_back(share: Share) -> None:
    share.put()
    assert share.store.objects == {key.hex(): FORM.seal(key, content) for key, content in BLOCKS}
    assert await share.pool.fetch(KEYS) == CONTENTS
    # half of the buffer holds three blocks
    assert share.store.puts == share.store.gets == [3, 3, 2]
    assert not share.failures


async def test_a_buffer_for_less_than_a_block_is_tried_with_one(store: DictStore) -> None:
    pool = KvPool({**SETTINGS, "local_buffer_size": 10}, "10.0.0.7", FORM, failed=lambda kind: None)
    pool.put_soon(BLOCKS[:2])
    pool._putter.submit(lambda: None).result(20)
    assert await pool.fetch(KEYS[:2]) == CONTENTS[:2]
    assert store.puts == store.gets == [1, 1]
    pool.close()


@pytest.mark.parametrize("missing", [0, 1, 5])
async def test_blocks_are_given_up_to_the_first_that_is_missing(share: Share, missing: int) -> None:
    share.put()
    del share.store.objects[KEYS[missing].hex()]
    assert await share.pool.fetch(KEYS) == CONTENTS[:missing]
    assert sum(share.store.gets) == missing
    assert not share.failures


async def test_a_full_pool_takes_the_next_blocks_where_it_has_room_again(share: Share) -> None:
    share.store.put_code = -200
    share.put()
    assert share.store.puts == [3], "the rest is of no use without what is missing"
    assert share.failures == {"full": 1}
    share.store.put_code = 0
    share.put()
    assert await share.pool.fetch(KEYS) == CONTENTS


@pytest.mark.parametrize(("code", "kind"), [(-800, "segment"), (-1, "master")])
async def test_after_a_put_that_failed_the_pool_gets_nothing_for_five_seconds(
    share: Share, code: int, kind: str
) -> None:
    share.store.put_code = code
    share.put()
    assert (share.store.puts, share.failures) == ([3], {kind: 1})
    share.store.put_code = 0
    share.now += 4.9
    share.put()
    assert share.store.objects == {}
    assert await share.pool.fetch(KEYS) == [], "it is asked all the same"
    share.now += 0.2
    share.put()
    assert await share.pool.fetch(KEYS) == CONTENTS


async def test_a_block_that_is_there_and_is_not_given_is_the_failure_of_one_engine(share: Share) -> None:
    """The pool is asked for others at once."""
    share.put()
    share.store.withheld = {KEYS[1].hex()}
    assert await share.pool.fetch(KEYS) is None
    assert share.failures == {"segment": 1}
    assert await share.pool.fetch(KEYS[2:]) == CONTENTS[2:]


@pytest.mark.parametrize("spoilt", [b"x" * FORM.sealed_bytes, b"x"])
async def test_a_pool_that_gives_something_else_is_left_alone_for_five_seconds(share: Share, spoilt: bytes) -> None:
    share.put()
    share.store.objects[KEYS[4].hex()] = spoilt
    assert await share.pool.fetch(KEYS) is None
    assert share.failures == {"damaged": 1}
    share.now += 4.9
    asked = len(share.store.gets)
    assert await share.pool.fetch(KEYS[:2]) == []
    share.put([(b"n" * 16, b"n" * 100)])
    assert (len(share.store.gets), (b"n" * 16).hex() in share.store.objects) == (asked, False)
    share.now += 0.2
    assert await share.pool.fetch(KEYS[:2]) == CONTENTS[:2]


async def test_a_master_that_does_not_know_is_a_failure(share: Share, caplog: pytest.LogCaptureFixture) -> None:
    share.put()
    share.store.ask_code = -7
    for _ in range(3):
        assert await share.pool.fetch(KEYS) is None
        share.now += 5.1
    assert share.failures == {"master": 3}
    assert sum("its master answered with code -7" in record.message for record in caplog.records) == 1


def test_the_pool_of_an_environment(store: DictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    assert KvPool.of_environment(FORM, lambda kind: None) is None
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(SETTINGS))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    for host, joined in ((None, "127.0.0.1"), ("10.0.0.9", "10.0.0.9")):
        if host is None:
            monkeypatch.delenv("VLLM_HOST_IP", raising=False)
        else:
            monkeypatch.setenv("VLLM_HOST_IP", host)
        pool = KvPool.of_environment(FORM, lambda kind: None)
        assert pool is not None
        assert (store.joined[0], store.joined[6]) == (joined, "node-3:5000")
        pool.close()
