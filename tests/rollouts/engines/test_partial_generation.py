"""Answers that come in parts: what arrived from an engine that is lost is kept, and another one goes on from there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from harness import Loop, make_run, running
from numpy.typing import NDArray
from stub_engine import EOS, StubEngine, encode

from hpcrl.network.http_server import stop_serving
from hpcrl.rollouts import parts as orchestrator_parts
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines.client import EngineClient, EngineError, EngineProtocolError, Generation, SamplingParams
from hpcrl.rollouts.engines.partial_generation import PartialGeneration

PARAMS = SamplingParams(temperature=1.0, max_tokens=10, seed=5, stop_token_ids=[EOS], stream_interval=4)
ALPHABET = encode("abcdefghijklmnopqrstuvwxyz0123456789")


def with_ledger(token_ids: list[int], seed: int) -> list[int]:
    """An answer that says the alphabet, from where the prompt has got to."""
    said = next((n for n in range(len(ALPHABET), 0, -1) if token_ids[-n:] == ALPHABET[:n]), 0)
    return [*ALPHABET[said:], EOS]


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> Iterator[None]:
    monkeypatch.setattr(engine_pool, "WATCH_S", 0.1)
    monkeypatch.setattr(engine_pool, "HEALTH_S", 0.3)
    monkeypatch.setattr(orchestrator_parts, "engines_lost_after_s", lambda run: 20.0)
    return


def slow_pair() -> tuple[StubEngine, StubEngine]:
    one, two = StubEngine(answer=with_ledger), StubEngine(answer=with_ledger)
    one.token_s = two.token_s = 0.03
    return one, two


def settings(interval: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 64}
    limits = {"rollouts_per_step": 8, "max_in_flight": 8, "max_off_policy_steps": 1}
    return {"rollouts": {"stream_interval": interval, "sampling": sampling, **limits}}


def answers(loop: Loop) -> list[list[int]]:
    """Sampled tokens of the last batch."""
    return [r.token_ids[r.sampled == 1].tolist() for r in loop.last_rollouts()]


@pytest.mark.parametrize("interval", [0, 4])
async def test_tokens_of_a_lost_engine_are_kept_where_they_arrived(tmp_path: Path, interval: int) -> None:
    one, two = slow_pair()
    async with running(make_run(tmp_path, **settings(interval)), one, two) as loop:
        await loop.until(lambda: one.in_flight >= 4 and one.sampled >= 4 * 20)
        before = two.sampled
        await one.stop()
        batch = await loop.batch(1)
        counters = loop.parts.counters
        assert answers(loop) == [[*ALPHABET, EOS]] * 8
        assert (counters.dropped_engine, counters.dropped_environment, counters.dropped_group) == (0, 0, 0)
        assert batch.stats.staleness_max == 0
        kept = [64 - request["sampling_params"]["max_tokens"] for request in two.requests]
        assert sum(kept) == counters.tokens_kept
        if interval:
            assert counters.tokens_kept >= 4 * 16
            # the noise of the rest is not that of the beginning
            seeds = [request["sampling_params"]["seed"] for request in one.requests + two.requests]
            assert len(set(seeds)) == len(seeds)
        else:
            assert two.sampled - before >= 4 * len(ALPHABET)


async def test_an_engine_that_was_not_seen_with_its_weights_is_not_believed(tmp_path: Path, monkeypatch: Any) -> None:
    """It may have been replaced by a process with the start model, and lost again, between two looks."""
    monkeypatch.setattr(engine_pool, "WATCH_S", 3600.0)
    one, two = slow_pair()
    async with running(make_run(tmp_path, **settings(4)), one, two) as loop:
        await loop.until(lambda: one.in_flight >= 4 and one.sampled >= 4 * 20)
        await one.stop()
        await loop.batch(1)
        assert loop.parts.counters.tokens_kept == 0
        assert answers(loop) == [[*ALPHABET, EOS]] * 8


def sampled(token_ids: list[int], logprobs: list[float] | None = None) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.array(token_ids, np.int32), np.array(logprobs or [0.0] * len(token_ids), np.float32)


def test_the_rest_of_an_answer_is_asked_for_with_its_own_noise() -> None:
    draft = PartialGeneration([1, 2], PARAMS)
    assert draft.request(lambda: 3) == ([1, 2], PARAMS)
    draft.receive(*sampled([10], [-0.5]))
    draft.receive(*sampled([11, 12], [-0.75, -0.25]))
    assert draft.keep() == 3
    token_ids, params = draft.request(lambda: 4)
    assert token_ids == [1, 2, 10, 11, 12]
    assert (params.max_tokens, params.stream_interval) == (7, 4)
    assert params.seed not in (PARAMS.seed, PartialGeneration([1, 2], PARAMS).request(lambda: 4)[1].seed)
    rest = Generation(*sampled([13, EOS], [-1.0, -1.5]), np.array([4, 5], np.int32), "stop")
    whole = draft.whole(rest)
    assert whole.token_ids.tolist() == [10, 11, 12, 13, EOS]
    assert whole.logprobs.tolist() == [-0.5, -0.75, -0.25, -1.0, -1.5]
    assert whole.versions.tolist() == [3, 3, 3, 4, 5]
    # four bytes a token each, and no objects
    assert [each.dtype for each in (whole.token_ids, whole.logprobs, whole.versions)] == ["i4", "f4", "i4"]


def test_a_part_has_the_version_of_when_the_part_before_arrived() -> None:
    """It may have been sampled just after that."""
    version = 3
    draft = PartialGeneration([1], PARAMS)
    draft.request(lambda: version)
    draft.receive(*sampled([10]))
    version = 4
    draft.receive(*sampled([11, 12]))
    draft.receive(*sampled([13]))
    version = -1  # it went away
    draft.receive(*sampled([14]))
    assert draft.keep() == 5
    assert draft.tokens.arrays(5)[3].tolist() == [3, 3, 3, 4, 4]


def test_what_a_failed_attempt_brought_is_forgotten_where_it_is_not_kept() -> None:
    draft = PartialGeneration([1], PARAMS)
    draft.request(lambda: 0)
    draft.receive(*sampled([10]))
    assert draft.request(lambda: 0) == ([1], PARAMS)
    assert draft.keep() == 0


def test_at_least_one_token_is_asked_for() -> None:
    draft = PartialGeneration([1], PARAMS)
    draft.request(lambda: 0)
    draft.receive(*sampled(list(range(10, 20))))
    assert draft.keep() == 9
    assert draft.request(lambda: 0)[1].max_tokens == 1


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[EngineClient, list[bytes]]]:
    """A client of an engine that answers with given bytes."""
    pieces: list[bytes] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for piece in pieces:
            await answer.write(piece)
            await asyncio.sleep(0.01)
        await answer.write_eof()
        return answer

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]
    async with aiohttp.ClientSession() as http:
        yield EngineClient(http, name="engine-0", url=f"http://127.0.0.1:{port}"), pieces
    await stop_serving(runner)


def event(tokens: list[int], finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"token_ids": tokens, "logprobs": {"content": [{"logprob": -1.0}] * len(tokens)}}
    if finish:
        choice |= {"finish_reason": finish, "weight_versions": [{"version": "2", "start": 0, "end": 3}]}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def ask(client: EngineClient, parts: list[list[int]]) -> Generation:
    """An answer; ``parts`` gets what came before its end."""
    return await client.generate(
        [1],
        PARAMS,
        cache_salt="0",
        session_id="s",
        timeout_s=5.0,
        on_part=lambda tokens, scores, rows: parts.append(tokens.tolist()),
    )


async def test_parts_are_joined_wherever_the_network_cuts_them(scripted: tuple[EngineClient, list[bytes]]) -> None:
    client, pieces = scripted
    whole = event([5]) + event([6]) + event([EOS], "stop") + b"data: [DONE]\n\n"
    pieces += [whole[:30], whole[30:100], whole[100:101], whole[101:]]
    parts: list[list[int]] = []
    generation = await ask(client, parts)
    assert (generation.token_ids.tolist(), generation.versions.tolist()) == ([5, 6, EOS], [2, 2, 2])
    assert parts == [[5], [6]]


async def test_an_answer_that_is_cut_without_an_error_is_not_whole(scripted: tuple[EngineClient, list[bytes]]) -> None:
    client, pieces = scripted
    pieces += [event([5]), b"data: [DONE]\n\n"]
    with pytest.raises(EngineProtocolError, match="ended before the answer did") as caught:
        await ask(client, [])
    assert caught.value.unreachable


async def test_an_error_on_the_way_is_one(scripted: tuple[EngineClient, list[bytes]]) -> None:
    client, pieces = scripted
    pieces += [event([5]), b'data: {"error": {"message": "out of memory"}}\n\n', b"data: [DONE]\n\n"]
    with pytest.raises(EngineError, match="out of memory"):
        await ask(client, [])
    pieces[:] = [b"data: nonsense\n\n"]
    with pytest.raises(EngineProtocolError, match="cannot be read"):
        await ask(client, [])


async def test_nothing_is_kept_behind_a_part_that_lacks_log_probabilities(
    scripted: tuple[EngineClient, list[bytes]],
) -> None:
    """The engine is lost before the end of the answer would tell: tokens on both sides of a hole are no answer."""
    client, pieces = scripted
    hole = json.dumps({"choices": [{"token_ids": [6], "logprobs": None}]}).encode()
    pieces += [event([5]), b"data: " + hole + b"\n\n", event([7])]
    parts: list[list[int]] = []
    with pytest.raises(EngineError, match="ended before the answer did"):
        await ask(client, parts)
    assert parts == [[5]]
