"""Experts of prompts with two sides: the answer is decode's, the rows of its prompt are asked of the prefill engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from numpy.typing import NDArray
from real_router import NeverRestarted
from stub_engine import npy, npy_bytes

from hpcrl.errors import HpcrlError
from hpcrl.inference.kept_rows import KeptRows
from hpcrl.network.routed_experts_reference import PATH
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines import disaggregated_pool
from hpcrl.rollouts.engines.answers import Generation, SamplingParams
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.disaggregated_pool import DisaggregatedPool
from hpcrl.rollouts.engines.partial_generation import PartialGeneration
from hpcrl.rollouts.engines.router_client import RouterClient

PROMPT, START = list(range(10, 18)), 3
WHOLE = np.random.default_rng(0).integers(1, 8, (10, 2, 2), np.uint8)
"""Of a prompt of 8 tokens and an answer of 3, the last of which has none."""


class Sides:
    """A router that answers as decode does, and a prefill engine, as one server.

    Attributes
    ----------
    name:
        Of the request, as the router makes it; ``{url}`` is the server's.
    rows:
        What the prefill engine has; None: nothing.
    kept:
        Where decode keeps its own; None: it answers in base64.
    """

    def __init__(self) -> None:
        self.name = "generate-tokens-___prefill_addr_{url}___decode_addr_127.0.0.1:9_e7"
        self.rows: NDArray[Any] | None = WHOLE[START:8]
        self.kept: KeptRows | None = None
        self.asked: list[str] = []
        self.status, self.netloc = 200, ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", self.answer), web.get(PATH, self.give)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.netloc = f"127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def answer(self, request: web.Request) -> web.Response:
        experts = WHOLE[START:].copy()
        experts[: 7 - START] = 0  # decode computes the last token of a prompt
        choice = {
            "token_ids": [1, 2, 3],
            "logprobs": {"content": [{"logprob": -0.5}] * 3},
            "finish_reason": "length",
            "weight_versions": [{"version": "1", "start": 0, "end": 3}],
            "routed_experts": npy(experts)
            if self.kept is None
            else self.kept.keep("own", npy_bytes(experts), engine=self.netloc),
        }
        body = {"request_id": self.name.format(url=self.netloc), "choices": [choice]}
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def give(self, request: web.Request) -> web.Response:
        if self.kept is not None and request.query["name"] == "own":
            rows = await self.kept.take("own")
            return web.Response(status=404) if rows is None else web.Response(body=rows)
        assert request.query["late"]
        self.asked.append(request.query["name"])
        if self.rows is None or self.status != 200:
            return web.Response(status=404 if self.rows is None else self.status)
        return web.Response(body=npy_bytes(self.rows))


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    sides = Sides()
    runner = await sides.start()
    yield sides
    await runner.cleanup()


async def generation(sides: Sides, *, known: bool = True, rows: bool = True) -> tuple[Generation, int]:
    """What the pool makes of an answer, and how many rows it had of prefill."""
    counters, url = Counters(), f"http://{sides.netloc}"
    params = SamplingParams(temperature=1.0, max_tokens=3, seed=1, stop_token_ids=[], routed_experts_prompt_start=START)
    async with aiohttp.ClientSession() as session:
        pool = DisaggregatedPool(
            [EngineClient(session, name="prefill-0", url=url)],
            router=RouterClient(session, name="router", url=url),
            supervised=NeverRestarted(),
            events=None,
            counters=counters,
            request_timeout_s=10.0,
            max_retries=0,
        )
        answer = await pool._ask(pool.front, PartialGeneration(PROMPT, params, rows=rows), "1", "s")
    assert (answer.experts is not None) == known
    return answer, counters.rows_prefill


def known(answer: Generation) -> list[bool]:
    assert answer.experts is not None
    return (answer.experts.reshape(len(answer.experts), -1).max(axis=1) > 0).tolist()


@pytest.mark.parametrize("kept", [False, True])
async def test_rows_of_the_prompt_are_those_of_prefill(sides: Sides, kept: bool) -> None:
    sides.kept = KeptRows() if kept else None
    answer, counted = await generation(sides)
    assert answer.experts is not None
    assert (answer.experts == WHOLE[START:]).all()
    assert counted == 7 - START
    assert sides.asked == [f"___prefill_addr_{sides.netloc}___decode_addr_127.0.0.1:9_e7/0"]


async def test_the_prompt_has_its_rows_where_those_of_the_answer_are_lost(sides: Sides) -> None:
    """As when the decode engine is killed behind its answer; prefill computed the last token of the prompt, too."""
    sides.kept = KeptRows(limit_bytes=0)
    answer, counted = await generation(sides)
    assert answer.experts is not None
    assert known(answer) == [True] * 5 + [False] * 2
    assert (answer.experts[:5] == WHOLE[START:8]).all()
    assert (counted, len(sides.asked)) == (5, 1)


async def test_where_neither_side_has_rows_there_are_none(sides: Sides) -> None:
    """The next turn asks for all of them."""
    sides.kept, sides.rows = KeptRows(limit_bytes=0), None
    answer, counted = await generation(sides, known=False)
    assert answer.experts is None
    assert (counted, len(sides.asked)) == (0, 1)


async def test_who_wants_no_rows_asks_no_side_for_any(sides: Sides) -> None:
    sides.kept = KeptRows(limit_bytes=0)
    answer, counted = await generation(sides, known=False, rows=False)
    assert (answer.experts, counted, sides.asked) == (None, 0, [])


async def test_what_decode_has_itself_is_not_replaced(sides: Sides) -> None:
    assert sides.rows is not None
    sides.rows = sides.rows.copy()
    sides.rows[7 - START] = 7  # another pass over the token that decode has computed, too
    answer, _ = await generation(sides)
    assert answer.experts is not None
    assert (answer.experts == WHOLE[START:]).all()


async def test_what_prefill_does_not_know_either_stays_unknown(sides: Sides) -> None:
    """It fetched the first tokens from a pool."""
    assert sides.rows is not None
    sides.rows = sides.rows.copy()
    sides.rows[:2] = 0
    answer, counted = await generation(sides)
    assert known(answer) == [False] * 2 + [True] * 5
    assert counted == 2


@pytest.mark.parametrize("trouble", ["none", "error", "name", "stranger"])
async def test_rows_that_cannot_be_had_are_unknown(sides: Sides, trouble: str) -> None:
    match trouble:
        case "none":
            sides.rows = None
        case "error":
            sides.status = 500
        case "name":
            sides.name = "generate-tokens-e7"
        case "stranger":
            sides.name = sides.name.replace("{url}", "10.0.0.1:80")
    answer, counted = await generation(sides)
    assert known(answer) == [False] * 4 + [True] * 3
    assert counted == 0
    assert len(sides.asked) == (trouble in ("none", "error"))


async def test_rows_of_another_model_end_the_run(sides: Sides) -> None:
    sides.rows = np.ones((5, 3, 2), np.uint8)
    with pytest.raises(HpcrlError, match="different routed experts"):
        await generation(sides)


def test_unknown_rows_are_those_of_zeros() -> None:
    rows = np.array([[[0, 0], [0, 0]], [[0, 1], [0, 0]], [[0, 0], [0, 0]]], np.uint8)
    assert disaggregated_pool._unknown(rows).tolist() == [0, 2]
