"""Prefill and decode of the embedded engine, over HTTP: answers are those of the plain model, wherever KV came from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from embedded_sides import BLOCK, Side, check, flipped, prompt_of, side, whole
from engine_helpers import random_model, tiny_glm_arch

from hpcrl.inference.embedded.kv import prefill as kv_prefill
from hpcrl.inference.embedded.kv.prefill import BLOCKS_PATH
from hpcrl.modeling.decoder import Decoder


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_model(tiny_glm_arch(), 1)


@pytest.fixture
async def sides(model: Decoder) -> AsyncIterator[tuple[Side, Side]]:
    async with AsyncExitStack() as stack:
        prefill, decode = [await stack.enter_async_context(side(model)) for _ in range(2)]
        yield prefill, decode


async def test_decode_continues_from_what_prefill_computed(sides: tuple[Side, Side], model: Decoder) -> None:
    """Tokens, log-probabilities and experts; of a later turn prefill is asked for nothing that decode has itself."""
    prefill, decode = sides
    text = prompt_of(90)
    told = await prefill.hand_over(text)
    assert told == {"do_remote_decode": False, "do_remote_prefill": True} | {
        "remote_host": "127.0.0.1",
        "remote_port": prefill.server.port,
    }
    tokens = check(model, text, await decode.ask(text, kv_transfer_params=told))
    assert decode.fetched == (whole(text), whole(text), 0)
    assert decode.count('hpcrl_engine_routed_experts_rows_total{source="fetched"}') == whole(text)
    known = len(text) + len(tokens) - 1
    text = [*text, *tokens, *prompt_of(30, seed=1)]
    check(model, text, await decode.ask(text, kv_transfer_params=await prefill.hand_over(text)))
    asked = whole(text) - known // BLOCK * BLOCK
    assert decode.fetched[0] == 88 + asked
    assert decode.fetched[1:] == (88 + asked, 0)


async def test_many_at_once_and_blocks_run_out(model: Decoder) -> None:
    """Sequences that give their blocks back are computed again, by decode alone."""
    async with side(model) as prefill, side(model, num_blocks=66, max_num_batched_tokens=16) as decode:
        prompts = [prompt_of(40 + 7 * i, seed=i) for i in range(12)]

        async def one(prompt: list[int]) -> None:
            told = await prefill.hand_over(prompt)
            answer = await decode.ask(prompt, kv_transfer_params=told, sampling={"max_tokens": 30})
            check(model, prompt, answer)

        await asyncio.gather(*map(one, prompts))
        assert decode.engine._scheduler.num_preemptions
        assert decode.fetched == (sum(map(whole, prompts)), sum(map(whole, prompts)), 0)
        assert await asyncio.wrap_future(decode.engine.call(lambda: decode.engine._pool.usage)) == 0


async def test_without_its_prefill_engine_decode_computes_the_prompt(sides: tuple[Side, Side], model: Decoder) -> None:
    prefill, decode = sides
    prompt = prompt_of(50)
    told = await prefill.hand_over(prompt)
    await prefill.server.close()
    check(model, prompt, await decode.ask(prompt, kv_transfer_params=told))
    assert decode.fetched == (whole(prompt), 0, 1)


async def test_kv_of_another_salt_is_not_found(sides: tuple[Side, Side], model: Decoder) -> None:
    """That is not a failure: prefill answers that it has no such block."""
    prefill, decode = sides
    prompt = prompt_of(50)
    told = await prefill.hand_over(prompt, salt="1")
    check(model, prompt, await decode.ask(prompt, salt="2", kv_transfer_params=told))
    assert decode.fetched == (whole(prompt), 0, 0)


async def test_what_prefill_has_evicted_is_computed(model: Decoder) -> None:
    """Of a prompt whose last blocks made room, the first are used."""
    async with side(model, num_blocks=64) as prefill, side(model) as decode:
        prompt = prompt_of(100)
        told = await prefill.hand_over(prompt)
        await prefill.hand_over(prompt_of(200, seed=5))
        check(model, prompt, await decode.ask(prompt, kv_transfer_params=told))
        asked, had, failed = decode.fetched
        assert (asked, failed) == (whole(prompt), 0)
        assert 0 < had < asked


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data, size: data[:-1], id="cut in a block"),
        pytest.param(lambda data, size: flipped(data), id="a bit is wrong"),
        pytest.param(lambda data, size: data[size : 2 * size] + data[:size], id="blocks of other tokens"),
        pytest.param(lambda data, size: data + data[:size], id="more than was asked for"),
    ],
)
async def test_what_does_not_arrive_as_it_was_sent_is_not_used(
    sides: tuple[Side, Side], model: Decoder, spoil: Callable[[bytes, int], bytes]
) -> None:
    prefill, decode = sides
    prompt = prompt_of(50)
    told = await prefill.hand_over(prompt)
    async with spoiling(prefill, lambda data: spoil(data, prefill.engine.cached.format.sealed_bytes)) as port:
        check(model, prompt, await decode.ask(prompt, kv_transfer_params={**told, "remote_port": port}))
    assert decode.fetched == (whole(prompt), 0, 1)


async def test_blocks_of_another_layout_are_not_used(sides: tuple[Side, Side], model: Decoder) -> None:
    """Also where they are of the same size: here keys and values would change places."""
    prefill, decode = sides
    form = prefill.engine.cached.format
    prefill.engine.cached.format = form._replace(layout=form.layout.replace("keys0", "values0"))
    prompt = prompt_of(50)
    check(model, prompt, await decode.ask(prompt, kv_transfer_params=await prefill.hand_over(prompt)))
    assert decode.fetched == (whole(prompt), 0, 1)


async def test_a_prefill_engine_that_does_not_answer_is_not_waited_for(
    sides: tuple[Side, Side], model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_prefill, "_FETCH_S", 0.2)
    prefill, decode = sides
    prompt = prompt_of(50)
    told = await prefill.hand_over(prompt)
    async with spoiling(prefill, None) as port:
        check(model, prompt, await decode.ask(prompt, kv_transfer_params={**told, "remote_port": port}))
    assert decode.fetched == (whole(prompt), 0, 1)


@asynccontextmanager
async def spoiling(prefill: Side, spoil: Callable[[bytes], bytes] | None) -> AsyncIterator[int]:
    """A server that hands on what the engine answers, spoilt; its port. None: it never answers."""

    async def blocks(http: web.Request) -> web.Response:
        if spoil is None:
            await asyncio.sleep(30)
            raise AssertionError
        async with prefill.session.post(f"{prefill.url}{BLOCKS_PATH}", data=await http.read()) as answer:
            return web.Response(body=spoil(await answer.read()))

    app = web.Application()
    app.add_routes([web.post(BLOCKS_PATH, blocks)])
    async with TestServer(app) as server:
        assert server.port is not None
        yield server.port


@pytest.mark.parametrize("body", [b"", b"short"])
async def test_hashes_that_are_none_are_refused(sides: tuple[Side, Side], body: bytes) -> None:
    prefill, _ = sides
    async with prefill.session.post(f"{prefill.url}{BLOCKS_PATH}", data=body) as answer:
        assert answer.status == 400
        assert "hashes of 16 bytes" in await answer.text()
