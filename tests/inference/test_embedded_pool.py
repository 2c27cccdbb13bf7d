"""Embedded engines on one real Mooncake Store: a prefix that one has computed is read by the others, and is right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest
from embedded_sides import BLOCK, Side, check, flipped, prompt_of, side, whole
from engine_helpers import random_model, tiny_glm_arch
from store_testing import MISSING, REASON, RUN_ID, MasterRole, make_run_dir

from hpcrl.inference.embedded.engine.blocks import block_hash, root_hash
from hpcrl.inference.embedded.kv import pool as kv_pool
from hpcrl.inference.embedded.kv.pool import KvPool
from hpcrl.modeling.decoder import Decoder
from hpcrl.ports import choose_blocks
from hpcrl.store.endpoints import StoreEndpoints, engine_settings

pytestmark = pytest.mark.skipif(MISSING, reason=REASON)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_model(tiny_glm_arch(), 1)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterRole]:
    run = make_run_dir(tmp_path_factory.mktemp("pool") / "run")
    role = MasterRole(run, choose_blocks([3], first=21000, last=29999, host="127.0.0.1")[0])
    role.wait_ready()
    yield role
    if role.process.poll() is None:
        role.stop()


@pytest.fixture
def joined(master: MasterRole, model: Decoder) -> Callable[[], AbstractAsyncContextManager[Side]]:
    """Starts an engine that has a share in the pool."""
    settings = engine_settings(
        StoreEndpoints.read(master.run, 1),
        run_id=RUN_ID,
        protocol="tcp",
        devices=(),
        segment_bytes=32 << 20,
        local_buffer_bytes=16 << 20,
        disk=False,
    )
    return lambda: side(model, join=lambda form: KvPool(settings, "127.0.0.1", form))


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
    assert two.fetched[1] == 0


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
            check(model, prompt, await asyncio.wait_for(one.ask(prompt, "gone"), 10.0))
        assert one.fetched[1] == 0
        assert one.count('hpcrl_engine_kv_fetch_failures_total{source="pool"}') <= 1
