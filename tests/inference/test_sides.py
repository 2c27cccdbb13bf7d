"""Prefill and decode of the embedded engine, over HTTP: answers are those of the plain model, wherever KV came from."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from engine_helpers import decode_experts, forward, logprob_error, random_model, tiny_glm_arch

from hpcrl.gate import Gate
from hpcrl.inference.embedded.engine.config import EngineConfig
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.kv import prefill as kv_prefill
from hpcrl.inference.embedded.kv.fetching import KvFetcher
from hpcrl.inference.embedded.kv.prefill import BLOCKS_PATH
from hpcrl.inference.embedded.serving.process import engine_app
from hpcrl.inference.embedded.serving.serving import ModelFacts, Serving
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.decoder import Decoder

TOLERANCE = 1e-4
BLOCK = 4
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64, "block_size": BLOCK}


class Side:
    """An engine behind its HTTP server, both in this process.

    Attributes
    ----------
    url:
        Of the server.
    """

    def __init__(self, engine: Engine, server: TestServer, session: aiohttp.ClientSession) -> None:
        self.engine, self.server, self._session = engine, server, session
        self.url = f"http://127.0.0.1:{server.port}"

    async def ask(self, prompt: list[int], salt: str = "1", **request: Any) -> dict[str, Any]:
        """The answer to a request for eight tokens, or what ``request`` says."""
        sampling = {"max_tokens": 8, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        sampling |= request.pop("sampling", {})
        body = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": salt, **request}
        async with self._session.post(f"{self.url}/inference/v1/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return cast(dict[str, Any], await answer.json())

    async def hand_over(self, prompt: list[int], salt: str = "1") -> dict[str, Any]:
        """Compute a prompt, as a router asks for it; what the other side is told."""
        answer = await self.ask(prompt, salt, sampling={"max_tokens": 1}, kv_transfer_params={"do_remote_decode": True})
        # a router throws this answer away
        assert len(decode_experts(answer["choices"][0]["routed_experts"])) == 0
        return cast(dict[str, Any], answer["kv_transfer_params"])

    def count(self, name: str) -> float:
        """A counter, with its label where it has one."""
        lines = self.engine._metrics.registry.render().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    @property
    def fetched(self) -> tuple[float, float, float]:
        """Tokens whose KV was asked for elsewhere, those that were had, and prompts for which that failed."""
        asked, had = (self.count(f"vllm:external_prefix_cache_{name}_total{{}}") for name in ("queries", "hits"))
        return asked, had, self.count('hpcrl_engine_kv_fetch_failures_total{source="prefill"}')


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_model(tiny_glm_arch(), 1)


@asynccontextmanager
async def side(model: Decoder, **changes: Any) -> AsyncIterator[Side]:
    metrics = EngineMetrics(Registry({}))
    config = EngineConfig(**{**SIZES, "num_blocks": 256, "return_routed_experts": True, **changes})
    engine = Engine(model, config, metrics)
    loop = asyncio.get_running_loop()

    def deliver(delivery: Any) -> None:
        for request, output in delivery:
            loop.call_soon_threadsafe(request.on_output, output)

    async with aiohttp.ClientSession() as session:
        facts = ModelFacts(names=("m",), root="m", eos_token_id=None)
        serving = Serving(engine, None, facts, KvFetcher(engine, session, metrics))
        app = engine_app(Gate("engine", None), serving, cast(Any, None), metrics)
        engine.start(deliver)
        async with TestServer(app) as server:
            yield Side(engine, server, session)
    engine.stop()
    assert engine.failure is None


@pytest.fixture
async def sides(model: Decoder) -> AsyncIterator[tuple[Side, Side]]:
    async with AsyncExitStack() as stack:
        prefill, decode = [await stack.enter_async_context(side(model)) for _ in range(2)]
        yield prefill, decode


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(103) for _ in range(length)]


def check(model: Decoder, prompt: list[int], answer: dict[str, Any]) -> list[int]:
    """An answer is that of the plain model; the tokens of it."""
    choice = answer["choices"][0]
    tokens: list[int] = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprob_error(model, prompt, tokens, logprobs) < TOLERANCE
    expected, experts = forward(model, [*prompt, *tokens])
    assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert (decode_experts(choice["routed_experts"]) == experts[:-1]).all()
    return tokens


def whole(prompt: list[int]) -> int:
    """Tokens of whole blocks before the last token, which decode computes itself."""
    return (len(prompt) - 1) // BLOCK * BLOCK


async def test_decode_goes_on_from_what_prefill_computed(sides: tuple[Side, Side], model: Decoder) -> None:
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
    """That is no failure: prefill answers that it has no such block."""
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


def _flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data, size: data[:-1], id="cut in a block"),
        pytest.param(lambda data, size: _flipped(data), id="a bit is wrong"),
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
        async with prefill._session.post(f"{prefill.url}{BLOCKS_PATH}", data=await http.read()) as answer:
            return web.Response(body=spoil(await answer.read()))

    app = web.Application()
    app.add_routes([web.post(BLOCKS_PATH, blocks)])
    async with TestServer(app) as server:
        assert server.port is not None
        yield server.port


@pytest.mark.parametrize("body", [b"", b"short"])
async def test_hashes_that_are_none_are_refused(sides: tuple[Side, Side], body: bytes) -> None:
    prefill, _ = sides
    async with prefill._session.post(f"{prefill.url}{BLOCKS_PATH}", data=body) as answer:
        assert answer.status == 400
        assert "hashes of 16 bytes" in await answer.text()
