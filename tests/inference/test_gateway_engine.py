"""The gateway in front of a real engine: OpenAI's client on one side, the engine's answers on the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from engine_helpers import Server, embedded_command, start_server
from openai import AsyncOpenAI

from hpcrl.config.sampling import SamplingConfig
from hpcrl.modeling.decoder import Decoder
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Outcome
from hpcrl.rollouts.gateway import Gateway
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.conversation import Conversation
from hpcrl.rollouts.sampling.sampler import Sampler

TURNS = 50


@pytest.fixture(scope="module")
def server(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = embedded_command("--max-model-len", "1000", "--max-num-seqs", "8", "--weight-version", "0")
    running = start_server(command, *tiny, tmp_path_factory.mktemp("log") / "server.log")
    yield running
    assert running.stop() == 0


class Spy(EngineClient):
    """Remembers what the engine was given, and what it sampled."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.exchanged: list[tuple[list[int], list[int]]] = []

    async def generate(self, token_ids: Any, params: Any, **settings: Any) -> Any:
        given = token_ids.token_ids.tolist()
        answer = await super().generate(token_ids, params, **settings)
        self.exchanged.append((given, answer.token_ids.tolist()))
        return answer


class Front:
    """One rollout, a client of its endpoint, and the engine behind it."""

    def __init__(self, conversation: Conversation, client: AsyncOpenAI, engine: Spy, counters: Counters) -> None:
        self.conversation, self.client, self.engine, self.counters = conversation, client, engine, counters

    async def say(self, messages: list[Any]) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=messages)

    async def rollout(self) -> Rollout:
        made = await self.conversation.rollout(0, Outcome(reward=1.0), seconds=1.0)
        assert made is not None
        return made


@contextlib.asynccontextmanager
async def front(server: Server, *, max_new_tokens: int, max_retries: int = 2) -> AsyncIterator[Front]:
    counters = Counters()
    gateway = Gateway(counters)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(gateway.aclose)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        engine = Spy(http, name="engine-0", url=server.url)
        pool = EnginePool([engine], counters=counters, request_timeout_s=60.0, max_retries=0)
        pool.engines[0].serve(0, proved_s=0.0)
        pool.engines[0].end_exchange()
        sampler = Sampler(
            pool,
            Renderer.of_model(server.model_dir),
            temperature=1.0,
            sampling=SamplingConfig(max_new_tokens=max_new_tokens),
            max_model_len=1000,
            gateway=gateway,
        )
        conversation = Conversation(sampler, pool.session("group-0"), seed=5)
        endpoint = await stack.enter_async_context(conversation.endpoint())
        client = AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=max_retries)
        await stack.enter_async_context(client)
        yield Front(conversation, client, engine, counters)


async def test_fifty_turns_are_what_the_engine_has_sampled(server: Server) -> None:
    async with front(server, max_new_tokens=8) as made:
        history: list[Any] = []
        for number in range(TURNS):
            history.append({"role": "user", "content": f"{number}?"})
            answer = await made.say(history)
            history.append({"role": "assistant", "content": answer.choices[0].message.content})
        rollout = await made.rollout()
        # one sequence, which every request was a beginning of
        assert (rollout.lengths, len(made.engine.exchanged)) == ([len(rollout.token_ids)], TURNS)
        ids, sampled = rollout.token_ids.tolist(), rollout.sampled.astype(bool)
        for given, said in made.engine.exchanged:
            assert ids[: len(given) + len(said)] == [*given, *said]
        assert rollout.token_ids[sampled].tolist() == [t for _, said in made.engine.exchanged for t in said]
        assert set(rollout.versions.tolist()) == {0}
        # engines tell what they sampled under the same weights: its own log-probabilities of these tokens
        scores = server.generate(ids[:-1], max_tokens=1, temperature=1.0, prompt_logprobs=0)["prompt_logprobs"]
        places = [place for place in range(1, len(ids) - 1) if sampled[place]]
        found = [scores[place][str(ids[place])]["logprob"] for place in places]
        assert found == pytest.approx(rollout.logprobs[places].tolist(), abs=2e-3)


async def test_who_hangs_up_frees_the_engine(server: Server) -> None:
    async with front(server, max_new_tokens=500, max_retries=0) as made:
        server.ok("/pause?mode=keep&clear_cache=false")
        try:
            for stream in (False, True):
                asked = asyncio.create_task(
                    made.client.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": "x"}], stream=stream
                    )
                )
                await asyncio.to_thread(server.wait_for, lambda: in_engine(server) == 1, "a request in the engine")
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asked
                await asyncio.to_thread(server.wait_for, lambda: in_engine(server) == 0, "an aborted request")
        finally:
            server.ok("/resume")
        assert made.counters.gateway_aborts == 2
        assert not made.engine.exchanged
        answer = await made.say([{"role": "user", "content": "x"}])
        assert (await made.rollout()).sampled_tokens == answer.usage.completion_tokens


async def test_a_client_that_times_out_asks_again(server: Server) -> None:
    """Its SDK marks the repetition, but the first request was ended when it hung up: there is one turn."""
    async with front(server, max_new_tokens=8) as made:
        server.ok("/pause?mode=keep&clear_cache=false")
        asked = asyncio.create_task(
            made.client.with_options(timeout=1.0, max_retries=20).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x"}]
            )
        )
        await asyncio.to_thread(server.wait_for, lambda: made.counters.gateway_aborts >= 1, "a time-out", 60.0)
        server.ok("/resume")
        answer = await asked
        assert (await made.rollout()).sampled_tokens == answer.usage.completion_tokens


async def test_a_context_that_is_full(server: Server) -> None:
    async with front(server, max_new_tokens=8) as made:
        with pytest.raises(openai.BadRequestError) as error:
            await made.say([{"role": "user", "content": "x" * 2000}])
        assert error.value.code == "context_length_exceeded"
        await made.say([{"role": "user", "content": "x" * 900}])


def in_engine(server: Server) -> float:
    """Requests that the engine has."""
    metrics = server.metrics()
    return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
