"""Finding, reading, sharing and serving versions."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from handoff_lab import check_content, model_directory, publish

from hpcrl.errors import HandoffError
from hpcrl.network.auth import Gate
from hpcrl.network.credentials import Credentials
from hpcrl.weights import HandoffStore
from hpcrl.weights.format.manifest import Handoff
from hpcrl.weights.format.segments import SegmentMap, first_wrong_byte
from hpcrl.weights.read.fanout import parent_of
from hpcrl.weights.read.nodecache import NodeCache
from hpcrl.weights.read.ownership import Owner, OwnerLock, current_owner
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

WORDS = 5000
SEGMENT = 16 << 10
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def store(tmp_path: Path) -> HandoffStore:
    store = HandoffStore(tmp_path / "weights")
    for version in (1, 2):
        publish(store, version, model_directory(tmp_path / "model"), tensors=6, words=WORDS)
    return store


def settings(**changes: object) -> ReaderSettings:
    values: dict[str, object] = {"segment_bytes": SEGMENT, "pace": Pace(10.0, 1 << 20), **changes}
    return ReaderSettings(**values)  # type: ignore[arg-type]


def data_bytes(handoff: Handoff) -> int:
    return handoff.manifest.tensor_bytes


def test_segments_cover_every_byte_and_hashes_find_what_is_wrong(store: HandoffStore) -> None:
    handoff = store.open(1)
    segments = SegmentMap(handoff, SEGMENT)
    assert segments.key != SegmentMap(store.open(2), SEGMENT).key
    for path in handoff.shards:
        data, end = path.read_bytes(), 0
        for segment in segments.of(path.name):
            assert segment.offset == end
            end += segment.bytes
            part = bytearray(data[segment.offset : end])
            assert first_wrong_byte(segment, memoryview(part)) is None
            part[-1] ^= 1
            assert first_wrong_byte(segment, memoryview(part)) is not None
            assert segments.at(path.name, end - 1) == segment
            assert segments.in_order[segments.number(segment)] == segment
        assert end == len(data)


@pytest.mark.parametrize("shared", [False, True])
def test_a_version_is_read_once_verified_and_acknowledged(store: HandoffStore, tmp_path: Path, shared: bool) -> None:
    chosen = settings(cache_dir=tmp_path / "node" if shared else None)
    with Subscriber(store.root, "r", chosen) as subscriber:
        for _ in range(2):
            with subscriber.reading(2) as reading:
                assert subscriber.registration.leases == (2,)
                assert check_content(reading) == 6 * 8 * WORDS
        assert subscriber.registration.leases == ()
        read = subscriber.share.bytes_read
        once = data_bytes(store.open(2))
        if shared:
            assert once <= read < once + 4096  # the second time came from the cache
        else:
            assert 2 * once <= read < 2 * once + 8192
        subscriber.acknowledge(2)
    assert not shared or list((tmp_path / "node").iterdir()) == []  # the last one removed the cache


def test_bytes_are_read_across_segments(store: HandoffStore) -> None:
    path = store.open(2).shards[0]
    data = path.read_bytes()
    with Subscriber(store.root, "r", settings()) as subscriber, subscriber.reading(2) as reading:
        size = max(segment.bytes for segment in SegmentMap(store.open(2), SEGMENT).of(path.name))
        assert len(data) > 3 * size, "a stretch of more than two segments"
        for offset, length in ((0, 5), (size - 3, 7), (10, 3 * size), (0, len(data)), (len(data) - 1, 1), (4, 0)):
            assert bytes(reading.read(2, path.name, offset, length)) == data[offset : offset + length]


def test_what_is_not_there_is_reported_at_once(store: HandoffStore) -> None:
    with Subscriber(store.root, "r", settings()) as subscriber:
        began = time.monotonic()
        with pytest.raises(HandoffError, match=r"v000007 does not exist.*1, 2"), subscriber.reading(7):
            pass
        assert time.monotonic() - began < 5
        assert not subscriber.wait_for(3, timeout_s=0.0)
        assert subscriber.wait_for(1, timeout_s=0.0)


def test_a_late_reader_takes_the_newest_good_version_and_says_what_it_skipped(
    store: HandoffStore, tmp_path: Path
) -> None:
    for version in (3, 4):
        publish(store, version, model_directory(tmp_path / "model"))
    shard = store.open(4).shards[0]
    damaged = bytearray(shard.read_bytes())
    damaged[-3] ^= 1
    shard.write_bytes(damaged)
    (store.path_of(3) / "manifest.json").write_text("{")
    with Subscriber(store.root, "r", settings()) as subscriber:
        subscriber.share._sleep = lambda _: None
        loaded = subscriber.load_newest(check_content)
        assert loaded.version == 2
        assert [skipped.version for skipped in loaded.skipped] == [4, 3]
        assert shard.name in loaded.skipped[0].reason
        assert "manifest.json" in loaded.skipped[1].reason
        assert subscriber.load_newest(check_content, at_most=1).version == 1
        with pytest.raises(HandoffError, match="no version can be loaded: there is none"):
            subscriber.load_newest(check_content, at_most=0)


def test_a_deadline_comes_from_bytes_and_names_the_file(store: HandoffStore) -> None:
    pace = Pace(floor_s=0.2, bytes_per_s=1 << 30)
    with Subscriber(store.root, "r", settings(pace=pace, streams=1)) as subscriber:
        subscriber.load_segment = lambda *_: time.sleep(1.0)  # type: ignore[method-assign]
        with (
            subscriber.reading(2) as reading,
            pytest.raises(HandoffError, match=r"model-00001.*was not read within 0 s"),
        ):
            check_content(reading)


def read_in_process(root: Path, cache: Path, name: str, *, limit: int, together: Any, result: Any) -> None:
    chosen = settings(cache_dir=cache, cache_bytes=limit)
    with Subscriber(root, name, chosen) as subscriber:
        with subscriber.reading(2) as reading:
            # all at once, however long a process takes to start
            together.wait(300)
            check_content(reading)
        assert subscriber.cache is not None
        result.put((subscriber.share.bytes_read, subscriber.cache.private_bytes))


@contextlib.contextmanager
def ranks(store: HandoffStore, cache: Path, count: int, limit: int) -> Iterator[list[tuple[int, int]]]:
    queue = SPAWN.Queue()
    together = SPAWN.Barrier(count)
    processes = [
        SPAWN.Process(
            target=read_in_process,
            args=(store.root, cache, f"rank-{i}"),
            kwargs={"limit": limit, "together": together, "result": queue},
        )
        for i in range(count)
    ]
    for process in processes:
        process.start()
    figures = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    yield figures


@pytest.mark.parametrize("limit", [1 << 40, 4 * SEGMENT])
def test_ranks_of_a_node_read_each_byte_once(store: HandoffStore, tmp_path: Path, limit: int) -> None:
    once = data_bytes(store.open(2))
    # who keeps the cache alive, as the other engines of a node would
    with (
        contextlib.closing(
            NodeCache(
                tmp_path / "node",
                store.root,
                secret="5" * 64,
                limit_bytes=limit,
                segment_limit_s=Pace(10.0).limit_s,
            )
        ) as cache,
        ranks(store, tmp_path / "node", 3, limit) as figures,
    ):
        kept = [
            path
            for path in cache.directory.rglob("*")
            if path.name.isdecimal() and path.parent.name.startswith("model")
        ]
        assert sum(path.stat().st_size for path in kept) <= limit
    if limit > once:
        assert once <= sum(read for read, _ in figures) < once + 8192
        assert sum(private for _, private in figures) == 0
    else:
        # a small window: ranks that fall behind read again, at worst everybody everything once
        assert sum(read for read, _ in figures) < 3 * (once + 8192)
    assert list((tmp_path / "node").iterdir()) == []


def test_a_dead_owner_is_followed_and_a_live_one_is_not(tmp_path: Path) -> None:
    first, second = OwnerLock(tmp_path / "a.lock"), OwnerLock(tmp_path / "a.lock")
    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    second.release()
    me = current_owner()
    (tmp_path / "a.lock.7").write_text(str(me._replace(start_ticks=me.start_ticks - 1)))  # another had this pid
    assert first.acquire()
    assert os.listdir(tmp_path) == ["a.lock.8"]
    first.release()
    (tmp_path / "a.lock.1").write_text(str(me._replace(pid=1 << 22, namespace="4026500000")))  # of a container
    assert not first.acquire()
    (tmp_path / "a.lock.1").write_text(str(me._replace(boot="another")))
    assert first.acquire()
    assert Owner.parse(str(me)) == me
    assert Owner.parse("rubbish") is None


def test_what_the_dead_left_in_the_cache_is_removed(store: HandoffStore, tmp_path: Path) -> None:
    me = current_owner()
    dead = me._replace(start_ticks=me.start_ticks - 1)
    base = tmp_path / "node"
    deserted = base / f"hpcrl-weights-{os.getuid()}-0123"
    (deserted / "members").mkdir(parents=True)
    (deserted / "members" / str(dead)).touch()
    with Subscriber(store.root, "r", settings(cache_dir=base)) as subscriber:
        assert not deserted.exists()
        assert subscriber.cache is not None
        segments = SegmentMap(store.open(2), SEGMENT)
        shard = subscriber.cache.directory / segments.key / segments.files[0]
        shard.mkdir(parents=True)
        (shard / "1.lock.1").write_text(str(dead))
        (shard / ".1.loading").write_bytes(b"half")
        with subscriber.reading(2) as reading:
            check_content(reading)
        assert not (shard / ".1.loading").exists()


def test_trees_of_all_segments_use_all_nodes(store: HandoffStore) -> None:
    nodes = [f"n{i:02d}" for i in range(16)]
    for degree in (1, 2, 4):
        asked: dict[str, int] = dict.fromkeys(nodes, 0)
        for segment in range(32):
            roots = [node for node in nodes if parent_of(node, nodes, segment, degree=degree) is None]
            assert roots == [nodes[segment % 16]]
            for node in nodes:
                seen, at = set(), node
                while (parent := parent_of(at, nodes, segment, degree=degree)) is not None:
                    assert at not in seen
                    seen.add(at)
                    at = parent
                if node not in roots:
                    asked[parent_of(node, nodes, segment, degree=degree) or ""] += 1
        assert max(asked.values()) - min(asked.values()) <= 2 * degree
    assert parent_of("stranger", nodes, 0, degree=2) is None


#: of the second attempt of a run
CREDENTIALS = Credentials("5" * 64, 2)


def reading_node(store: HandoffStore, tmp_path: Path, name: str, **changes: object) -> Subscriber:
    chosen = settings(cache_dir=tmp_path / f"node-{name}", fanout_host="127.0.0.1", **changes)
    return Subscriber(store.root, name, chosen, node=name, gate=Gate("fanout", CREDENTIALS))


def test_nodes_serve_each_other_and_the_share_is_read_once(store: HandoffStore, tmp_path: Path) -> None:
    once = data_bytes(store.open(2))
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(reading_node(store, tmp_path, f"n{i}")) for i in range(4)]
        time.sleep(1.1)  # addresses are remembered for a second
        for subscriber in nodes:
            with subscriber.reading(2) as reading:
                check_content(reading)
        from_share = sum(subscriber.share.bytes_read for subscriber in nodes)
        from_peers = sum(subscriber.peers.bytes_read for subscriber in nodes if subscriber.peers)
        assert once <= from_share < once + 16384
        assert from_peers >= 3 * once
        assert sum(subscriber.peers.failures for subscriber in nodes if subscriber.peers) == 0


def test_a_peer_that_fails_or_lies_is_left_for_the_share(store: HandoffStore, tmp_path: Path) -> None:
    with reading_node(store, tmp_path, "n0") as good, reading_node(store, tmp_path, "n1") as bad:
        time.sleep(1.1)
        assert bad._server is not None
        bad._server._fetch = lambda *_: store.path_of(1) / "manifest.json"
        with good.reading(2) as reading:
            check_content(reading)
        assert good.peers is not None
        assert good.peers.failures >= 1
        failures = good.peers.failures
        bad._server.close()
        good.peers._shunned.clear()
        with good.reading(1) as reading:
            check_content(reading)
        assert good.peers.failures > failures
        assert good.peers.bytes_read == 0


def test_only_segments_of_published_versions_are_served_and_only_with_the_token(
    store: HandoffStore, tmp_path: Path
) -> None:
    with reading_node(store, tmp_path, "n0") as node:
        assert node._server is not None
        key = SegmentMap(store.open(2), SEGMENT).key
        shard = store.open(2).shards[0]
        token = CREDENTIALS.bearer

        def ask(path: str, token: str) -> int:
            request = urllib.request.Request(f"{node._server.url}{path}", headers={"Authorization": f"Bearer {token}"})
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    data = answer.read()
                    assert shard.read_bytes().startswith(data)
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                error.close()
                return error.code

        assert ask(f"/segments/{key}/{shard.name}/0", token) == 200
        # behind the last one
        count = len(SegmentMap(store.open(2), SEGMENT).of(shard.name))
        assert ask(f"/segments/{key}/{shard.name}/{count}", token) == 404
        assert ask(f"/segments/{key}/{shard.name}/0", "wrong") == 401
        assert ask(f"/segments/{key}/{shard.name}/0", "") == 401
        assert ask(f"/segments/{key}/{shard.name}/0", Credentials(CREDENTIALS.token, 1).bearer) == 403
        assert ask(f"/segments/{key}/{shard.name}/999", token) == 404
        assert ask(f"/segments/{key}/..%2F..%2Fmodel%2Fconfig.json/0", token) == 404
        assert ask(f"/segments/{key[:-1]}x/{shard.name}/0", token) == 404
        assert ask("/segments/..%2F..%2Fetc/passwd/0", token) == 404
