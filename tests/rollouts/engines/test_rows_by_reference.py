"""Experts of an answer behind each real router: it hands on where they are, the engine gives them as raw bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from real_router import Router
from stub_engine import StubEngine, npy_bytes

from hpcrl.inference.kept_rows import KeptRows
from hpcrl.network.routed_experts_reference import FIELD, RowsReference
from hpcrl.rollouts.engines.client import EngineClient, EngineError, Generation, SamplingParams
from hpcrl.rollouts.engines.router_client import RouterClient

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT, ANSWER = list(range(10, 30)), list(range(40, 49))
TOKENS = [*PROMPT, *ANSWER]
ROWS = np.random.default_rng(0).integers(0, 8, (len(TOKENS), 3, 2), np.uint8)
START = 4
INTERVALS = [pytest.param(msgspec.UNSET, id="whole"), pytest.param(4, id="in parts")]


class Spoilt(KeptRows):
    """A store whose rows are fetched once, in place of which something else comes.

    Attributes
    ----------
    given:
        What comes of the rows that were asked for; None: nothing.
    """

    def __init__(self, *given: bytes | None) -> None:
        super().__init__()
        self.given = list(given)
        self.asked = 0

    async def take(self, name: str, *, late: bool = False) -> bytes | None:
        self.asked += 1
        rows = await super().take(name, late=late)
        return self.given.pop(0) if self.given else rows


@pytest.fixture
async def stub() -> AsyncIterator[StubEngine]:
    stub = StubEngine(answer=lambda token_ids, seed: ANSWER)
    stub.version, stub.rows = "1", KeptRows()
    stub.experts = lambda token_ids: ROWS[: len(token_ids)]
    await stub.start()
    yield stub
    await stub.stop()


@pytest.fixture(scope="module", params=["vllm-router", "dynamo"])
def router(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Router]:
    router = Router(tmp_path_factory.mktemp("router") / "router.log", request.param)
    router.start()
    yield router
    router.kill()


class Asker:
    """The orchestrator's client of a router.

    Attributes
    ----------
    engine:
        The client of the engine behind it.
    parts:
        Tokens of each part but the last, and whether their rows came with them.
    """

    def __init__(self, session: aiohttp.ClientSession, router: Router, stub: StubEngine) -> None:
        ours = router.kind == "dynamo"
        self.client = RouterClient(session, name="router", url=router.url, hands_on_content_types=ours)
        self.engine = EngineClient(session, name="engine-0", url=stub.url)
        self.client.behind = lambda: [self.engine]
        self.parts: list[tuple[int, bool]] = []

    async def ask(self, interval: int | msgspec.UnsetType) -> Generation:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=len(ANSWER),
            seed=5,
            stop_token_ids=[],
            stream_interval=interval,
            routed_experts_prompt_start=START,
        )

        def arrived(tokens: list[int], logprobs: list[float], rows: NDArray[np.generic] | None) -> None:
            self.parts.append((len(tokens), rows is not None))

        return await self.client.generate(
            PROMPT, params, cache_salt="1", session_id="s", timeout_s=60.0, on_part=arrived
        )


@asynccontextmanager
async def asking(router: Router, stub: StubEngine) -> AsyncIterator[Asker]:
    """With the engine behind the router for so long."""
    async with aiohttp.ClientSession() as session:
        asker = Asker(session, router, stub)
        await asker.client.add(stub.url, timeout_s=30.0)
        try:
            yield asker
        finally:
            await asker.client.remove(stub.url, timeout_s=30.0)


def whole(generation: Generation) -> bool:
    """Tokens are right in any case; whether rows are there, which are then right."""
    assert generation.token_ids.tolist() == ANSWER
    if generation.experts is None:
        return False
    assert (generation.experts == ROWS[START : len(TOKENS) - 1]).all()
    return True


@pytest.mark.parametrize("interval", INTERVALS)
async def test_the_router_sees_no_rows(router: Router, stub: StubEngine, interval: int | msgspec.UnsetType) -> None:
    """And the client gets all of them, each once."""
    async with asking(router, stub) as asker:
        assert whole(await asker.ask(interval))
        assert asker.parts == ([] if interval is msgspec.UNSET else [(1, True), (4, True)])
        assert stub.rows is not None
        assert stub.rows.bytes == 0
        kept = await reference(router, stub)
        assert kept.engine == stub.url.removeprefix("http://")
        assert (await asker.engine.kept_rows(kept, timeout_s=30.0) == ROWS[START : len(TOKENS) - 1]).all()
        # once
        with pytest.raises(EngineError, match="are gone"):
            await asker.engine.kept_rows(kept, timeout_s=30.0)


async def reference(router: Router, stub: StubEngine) -> RowsReference:
    """What the router hands on in place of rows, to the same request as the last."""
    body = {**stub.requests[-1], "stream": False}
    url = f"{router.url}/inference/v1/generate"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        (choice,) = (await answer.json())["choices"]
    return msgspec.convert(choice["routed_experts"], RowsReference)


async def test_an_engine_that_does_not_know_of_it_answers_in_base64(router: Router, stub: StubEngine) -> None:
    stub.rows = None
    async with asking(router, stub) as asker:
        assert whole(await asker.ask(msgspec.UNSET))
        assert whole(await asker.ask(4))


FAULTS = {
    "evicted": None,
    "wrong": npy_bytes(ROWS[START : len(TOKENS) - 1] ^ 1),
    "short": npy_bytes(ROWS[START : len(TOKENS) - 1])[:-1],
    "empty": b"",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_rows_that_do_not_come_as_they_were_kept_are_unknown(
    router: Router, stub: StubEngine, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    stub.rows = store = Spoilt(FAULTS[fault])
    async with asking(router, stub) as asker:
        assert not whole(await asker.ask(msgspec.UNSET))
        assert "routed experts of an answer are unknown: engine-0: routed experts of an answer " in caplog.text
        assert store.asked == 1
        # and of an answer in parts all that come after them
        store.given.append(FAULTS[fault])
        assert not whole(await asker.ask(4))
        assert asker.parts == [(1, False), (4, False)]
        assert whole(await asker.ask(4))


async def test_rows_of_a_later_part_are_unknown_alone(router: Router, stub: StubEngine) -> None:
    """What came before may be kept, should the engine be lost."""
    async with asking(router, stub) as asker:
        stub.rows = Spoilt(npy_bytes(ROWS[START : len(PROMPT)]), None)
        assert not whole(await asker.ask(4))
        assert asker.parts == [(1, True), (4, False)]


async def test_an_engine_that_is_gone_after_its_answer(
    router: Router, stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(router, stub) as asker:
        fetch = asker.engine.kept_rows

        async def killed_before(kept: RowsReference, *, timeout_s: float) -> NDArray[np.generic]:
            await stub.stop()
            return await fetch(kept, timeout_s=timeout_s)

        monkeypatch.setattr(asker.engine, "kept_rows", killed_before)
        assert not whole(await asker.ask(msgspec.UNSET))


async def test_a_stranger_is_asked_for_nothing(router: Router, stub: StubEngine) -> None:
    """It would be sent the run's token."""
    stranger = StubEngine()
    stranger.rows = store = Spoilt()
    await stranger.start()
    try:
        async with asking(router, stub) as asker:
            # the answer names it, and it has the rows
            stub.rows, stub.said_port = store, stranger.port
            assert not whole(await asker.ask(msgspec.UNSET))
    finally:
        await stranger.stop()
    assert store.asked == 0
    assert store.bytes > 0


async def test_clients_that_want_no_rows_get_no_references(router: Router, stub: StubEngine) -> None:
    async with asking(router, stub) as asker:
        params = SamplingParams(temperature=1.0, max_tokens=2, seed=5, stop_token_ids=[])
        answer = await asker.client.generate(PROMPT, params, cache_salt="1", session_id="s", timeout_s=60.0)
    assert answer.experts is None
    assert FIELD not in stub.requests[-1]
