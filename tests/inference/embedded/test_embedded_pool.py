"""Embedded engines on one real Mooncake Store: a prefix that one has computed is read by the others, and is right."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
from embedded_sides import BLOCK, Side, check, flipped, prompt_of, side, whole
from engine_helpers import random_model, tiny_glm_arch
from free_ports import free_blocks
from store_testing import MISSING, REASON, RUN_ID, MasterRole, make_run_dir

from hpcrl.inference.embedded.engine.blocks import block_hash, root_hash
from hpcrl.inference.embedded.kv import pool as kv_pool
from hpcrl.inference.embedded.kv.pool import KvPool
from hpcrl.inference.embedded.kv.sealing import BlockFormat
from hpcrl.modeling.decoder import Decoder
from hpcrl.store.endpoints import StoreEndpoints, engine_settings

pytestmark = pytest.mark.skipif(MISSING, reason=REASON)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_model(tiny_glm_arch(), 1)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterRole]:
    run = make_run_dir(tmp_path_factory.mktemp("pool") / "run")
    # what was asked for stays in the pool for longer than any of these tests takes
    role = MasterRole(run, free_blocks([3])[0], lease_ttl_s=120.0)
    role.wait_ready()
    yield role
    if role.process.poll() is None:
        role.stop()


#: of blocks that no model has computed
FORM = BlockFormat("a layout", 64 << 10)
#: has a share in the pool, and is there until it is killed
OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
host, metadata, segment, buffer, protocol, devices, master, tenant = sys.argv[1:]
sizes = int(segment), int(buffer)
assert store.setup(host, metadata, *sizes, protocol, devices, master, tenant_id=tenant) == 0
print("joined", flush=True)
sys.stdin.read()
"""


def share(master: MasterRole, segment_mib: int = 32) -> dict[str, Any]:
    """What an engine must know to have a share in the pool."""
    return engine_settings(
        StoreEndpoints.read(master.run, 1),
        run_id=RUN_ID,
        protocol="tcp",
        devices=(),
        segment_bytes=segment_mib << 20,
        local_buffer_bytes=16 << 20,
        disk=False,
    )


@pytest.fixture
def joined(master: MasterRole, model: Decoder) -> Callable[[], AbstractAsyncContextManager[Side]]:
    """Starts an engine that has a share in the pool."""
    settings = share(master)
    return lambda: side(model, join=lambda form, failed: KvPool(settings, "127.0.0.1", form, failed=failed))


@pytest.fixture
async def engines(joined: Callable[[], AbstractAsyncContextManager[Side]]) -> AsyncIterator[tuple[Side, Side]]:
    async with joined() as one, joined() as two:
        yield one, two


async def kept(one: Side) -> None:
    """All blocks that an engine has filled so far are in the pool."""
    assert one.pool is not None
    await asyncio.wrap_future(one.pool._putter.submit(lambda: None))


async def test_a_prefix_of_one_engine_is_read_by_the_other(engines: tuple[Side, Side], model: Decoder) -> None:
    """Under the same salt; what has none stays where it is."""
    one, two = engines
    for salt, found in (("1", True), (None, False)):
        prompt = prompt_of(90, seed=11)
        check(model, prompt, await one.ask(prompt, salt))
        await kept(one)
        before = two.fetched
        check(model, prompt, await two.ask(prompt, salt))
        asked, had, failed = (now - then for now, then in zip(two.fetched, before, strict=True))
        assert (asked, had, failed) == ((whole(prompt), whole(prompt), 0) if found else (0, 0, 0))
    check(model, prompt, await two.ask(prompt, "2"))
    assert two.count('hpcrl_engine_kv_fetched_tokens_total{source="pool"}') == whole(prompt)


async def test_of_a_later_turn_prefill_reads_what_decode_has_sampled(
    engines: tuple[Side, Side], model: Decoder
) -> None:
    prefill, decode = engines
    text = prompt_of(60, seed=21)
    told = await prefill.hand_over(text, "turns")
    tokens = check(model, text, await decode.ask(text, "turns", kv_transfer_params=told, sampling={"max_tokens": 20}))
    await kept(decode)
    # the last token was not computed
    known = (len(text) + len(tokens) - 1) // BLOCK * BLOCK
    text = [*text, *tokens, *prompt_of(20, seed=22)]
    check(model, text, await decode.ask(text, "turns", kv_transfer_params=await prefill.hand_over(text, "turns")))
    assert prefill.count('hpcrl_engine_kv_fetched_tokens_total{source="pool"}') == known - 60
    assert decode.count('hpcrl_engine_kv_fetched_tokens_total{source="pool"}') == 0
    assert decode.fetched[0] == decode.fetched[1] == 56 + whole(text) - known


@pytest.mark.parametrize(
    "spoil", [pytest.param(flipped, id="a bit is wrong"), pytest.param(lambda d: d[:-1], id="cut")]
)
async def test_an_object_that_is_not_what_was_put_is_not_used(
    engines: tuple[Side, Side], model: Decoder, spoil: Callable[[bytes], bytes]
) -> None:
    one, two = engines
    prompt, salt = prompt_of(50, seed=31), f"spoilt-{len(spoil(bytes(200)))}"
    check(model, prompt, await one.ask(prompt, salt))
    await kept(one)
    assert one.pool is not None
    name = block_hash(root_hash(salt), np.asarray(prompt[:BLOCK], np.int32).tobytes()).hex()
    stored = one.pool._store.get(name)
    assert one.pool._store.remove(name, True) == 0
    assert one.pool._store.put(name, spoil(stored)) == 0
    check(model, prompt, await two.ask(prompt, salt))
    assert two.count('hpcrl_engine_kv_fetch_failures_total{source="pool"}') == 1
    assert two.count('hpcrl_engine_kv_pool_failures_total{kind="damaged"}') == 1
    assert two.fetched[1] == 0


def blocks_of(tag: str, count: int) -> list[tuple[bytes, bytes]]:
    """Names and contents."""
    return [(hashlib.md5(f"{tag}{i}".encode()).digest(), bytes([i % 251]) * FORM.block_bytes) for i in range(count)]


@contextmanager
def bare(master: MasterRole, segment_mib: int = 32) -> Iterator[tuple[KvPool, Counter[str]]]:
    """A share of an engine that is not there, and its failures by kind."""
    failures: Counter[str] = Counter()

    def failed(kind: str) -> None:
        failures[kind] += 1

    with closing(KvPool(share(master, segment_mib), "127.0.0.1", FORM, failed=failed)) as pool:
        yield pool, failures


def put(pool: KvPool, blocks: list[tuple[bytes, bytes]]) -> None:
    pool.put_soon(blocks)
    pool._putter.submit(lambda: None).result(20)


async def test_more_blocks_than_the_buffer_has_room_for_come_and_go_in_parts(master: MasterRole) -> None:
    blocks = blocks_of("parts", 300)
    with bare(master) as (pool, failures):
        put(pool, blocks)
        assert await pool.fetch([key for key, _ in blocks]) == [content for _, content in blocks]
    assert not failures


async def test_a_full_pool_takes_nothing_and_still_gives(master: MasterRole, caplog: pytest.LogCaptureFixture) -> None:
    with bare(master, segment_mib=16) as (pool, failures):
        first = blocks_of("first", 20)
        for some in (first, *(blocks_of(f"more {more}", 50) for more in range(8))):
            put(pool, some)
            # it stays full: what was asked for is not thrown out for what comes
            await pool.fetch([key for key, _ in some])
        # at once: who has room for nothing may well be asked
        assert await pool.fetch([key for key, _ in first]) == [content for _, content in first]
    assert list(failures) == ["full"]
    told = [record.message for record in caplog.records if record.name == kv_pool.__name__]
    assert failures["full"] > 1 == len(told)
    assert "the KV pool failed (full): 50 blocks cannot be put: code -200" in told[0]


async def test_blocks_that_go_between_question_and_answer_are_no_failure(
    master: MasterRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of("gone", 6)
    with bare(master) as (pool, failures):
        put(pool, blocks)
        ask = pool._are_there

        def ask_then_make_room(keys: Sequence[bytes]) -> list[bool]:
            there = ask(keys)
            if len(keys) == len(blocks):
                assert pool._store.remove(keys[4].hex(), True) == 0
            return there

        monkeypatch.setattr(pool, "_are_there", ask_then_make_room)
        assert await pool.fetch([key for key, _ in blocks]) == [content for _, content in blocks[:4]]
    assert not failures


async def test_one_call_that_hangs_is_distinguished_from_those_that_wait_behind_it(
    master: MasterRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pool, "_FETCH_S", 0.5)
    processes = [psutil.Process(master.process.pid), *psutil.Process(master.process.pid).children(recursive=True)]
    with bare(master) as (pool, failures):
        blocks = blocks_of("slow", 14)
        put(pool, blocks)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            assert await asyncio.gather(*(pool.fetch([key]) for key, _ in blocks)) == [None] * 14
            # nobody asks for a while
            assert await pool.fetch([blocks[0][0]]) == []
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)
    assert failures == {"timeout": 1, "behind": 13}


async def test_blocks_of_an_engine_that_was_killed_are_a_failure_of_their_own_kind(master: MasterRole) -> None:
    """Until the master has noticed it, which takes seconds, it says that they are there."""
    settings = share(master)
    names = "metadata_server", "global_segment_size", "local_buffer_size", "protocol", "device_name"
    words = [str(settings[name]) for name in (*names, "master_server_address", "tenant_id")]
    command = [sys.executable, "-c", OWNER, "127.0.0.1", *words]
    owner = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    try:
        assert "joined" in iter(lambda: owner.stdout.readline().strip(), "")
        # this one gives no memory: all that it puts is the other's
        with bare(master, segment_mib=0) as (pool, failures):
            blocks = blocks_of("lost", 20)
            put(pool, blocks)
            keys, contents = zip(*blocks, strict=True)
            assert await pool.fetch(keys) == list(contents)
            owner.kill()
            owner.wait()
            # each call of its own: of one engine that is gone nobody concludes that the others have nothing
            assert [await pool.fetch(keys), await pool.fetch(keys)] == [None, None]
            assert failures == {"segment": 2}
            put(pool, blocks_of("nowhere", 3))
            assert failures == {"segment": 3}
    finally:
        owner.kill()
        owner.communicate()


async def test_without_its_master_engines_compute(
    joined: Callable[[], AbstractAsyncContextManager[Side]],
    model: Decoder,
    master: MasterRole,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last test: a request takes a little longer, the ones behind it do not."""
    monkeypatch.setattr(kv_pool, "_FETCH_S", 0.5)
    async with joined() as one:
        master.stop()
        for seed in (41, 42, 43):
            prompt = prompt_of(50, seed=seed)
            check(model, prompt, await asyncio.wait_for(one.ask(prompt, "gone"), 120.0))
        assert one.fetched[1] == 0
        assert one.count('hpcrl_engine_kv_fetch_failures_total{source="pool"}') == 1
        timeouts, by_master = (
            one.count(f'hpcrl_engine_kv_pool_failures_total{{kind="{kind}"}}') for kind in ("timeout", "master")
        )
        # a call that is under way when the master ends is told so; one after it waits
        assert timeouts + by_master == 1
        # where somebody waits for it: Mooncake's client tries for more than four seconds
        monkeypatch.setattr(kv_pool, "_FETCH_S", 30.0)
        assert one.pool is not None
        one.pool._gets_again_s = 0.0
        assert await one.pool.fetch([b"0" * 16]) is None
        assert one.count('hpcrl_engine_kv_pool_failures_total{kind="master"}') == by_master + 1
