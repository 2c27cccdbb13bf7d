"""Summaries of ``swe`` with a real engine: which sequences there are, and that each sampled token is trained once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_helpers import Server, embedded_command, start_server

from hpcrl.config.environments import SweEnv
from hpcrl.config.sampling import SamplingConfig
from hpcrl.modeling.decoder import Decoder
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Message, Outcome, Prompt, Reply, ToolCall
from hpcrl.rollouts.environments.swe.swe_work import SweWork
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.conversation import Conversation
from hpcrl.rollouts.sampling.sampler import Sampler

TASK = ({"role": "system", "content": "Mend it."}, {"role": "user", "content": "The sum is wrong."})
WINDOW = 1000


@pytest.fixture(scope="module")
def server(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = embedded_command("--max-model-len", str(WINDOW), "--max-num-seqs", "4", "--weight-version", "0")
    running = start_server(command, *tiny, tmp_path_factory.mktemp("log") / "server.log")
    yield running
    assert running.stop() == 0


class Spy(EngineClient):
    """Remembers what the engine was given, and what it sampled."""

    exchanged: list[tuple[list[int], list[int]]]

    async def generate(self, token_ids: Any, params: Any, **settings: Any) -> Any:
        given = token_ids.token_ids.tolist()
        answer = await super().generate(token_ids, params, **settings)
        self.exchanged.append((given, answer.token_ids.tolist()))
        return answer


class Tools:
    """Answers with as many characters as it is told, one answer after the other; -60: up to 60 below the window."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.context = list(sizes), 0

    async def call(self, name: str, arguments: Any, *, timeout_s: float) -> str:
        size = self.sizes.pop(0)
        return "r" * (size if size >= 0 else WINDOW + size - self.context)


class Calling:
    """The policy of a conversation. The tiny model writes no calls: each turn has one while tools have answers."""

    def __init__(self, conversation: Conversation, tools: Tools) -> None:
        self.conversation, self.tools, self.heard = conversation, tools, list[tuple[list[Message], bool, bool]]()
        self.seed = conversation.seed

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        reply = await self.conversation.reply(messages, anew=anew, within=within)
        self.heard.append((list(messages), anew, reply.fits))
        self.tools.context = reply.context or self.tools.context
        if not reply.fits or not self.tools.sizes:
            return reply
        return dataclasses.replace(reply, calls=(ToolCall("bash", {}, "call-1"),))


@contextlib.asynccontextmanager
async def rollout_of(server: Server, *sizes: int, **settings: Any) -> AsyncIterator[tuple[SweWork, Calling, Spy]]:
    """One rollout whose tools give answers of these sizes."""
    counters, tools = Counters(), Tools(*sizes)
    async with aiohttp.ClientSession() as http:
        engine = Spy(http, name="engine-0", url=server.url)
        engine.exchanged = []
        pool = EnginePool([engine], counters=counters, request_timeout_s=60.0, max_retries=0)
        pool.engines[0].serve(0, proved_s=0.0)
        pool.engines[0].end_exchange()
        # two thirds of the tokens end a turn: turns have some tokens, and end by themselves
        sampling = SamplingConfig(max_new_tokens=200, stop_token_ids=tuple(range(30, 103)))
        sampler = Sampler(
            pool, Renderer.of_model(server.model_dir), temperature=1.0, sampling=sampling, max_model_len=WINDOW
        )
        conversation = Conversation(sampler, pool.session("group-0"), seed=5)
        policy = Calling(conversation, tools)
        work = SweWork(SweEnv(name="mend", kind="swe", tasks="none", **settings), tools)  # type: ignore[arg-type]
        await work.run(Prompt("train", 0, TASK), policy)  # type: ignore[arg-type]
        yield work, policy, engine


async def test_branches_begin_at_the_points_and_each_token_is_trained_once(server: Server) -> None:
    sizes = (50, 60, 100, 100, 100, 150, 150, 150, 10)
    async with rollout_of(server, *sizes, summary_points=[300, 500], summary_room_tokens=100) as (work, policy, engine):
        rollout = await policy.conversation.rollout(0, Outcome(reward=1.0), seconds=1.0)
    assert rollout is not None
    assert (work.summaries, policy.conversation.declared_branches, len(rollout.lengths)) == (2, 2, 3)
    assert work.turns == len(engine.exchanged) == len(sizes) + 1 + 2
    assert not work.truncated

    # all requests are beginnings of sequences, and each has sampled what it was answered
    ids, flags = rollout.token_ids.tolist(), rollout.sampled.astype(bool).tolist()
    starts = [sum(rollout.lengths[:number]) for number in range(len(rollout.lengths))]
    trained = [0] * len(rollout.lengths)
    for turn, (given, said) in zip(rollout.turns, engine.exchanged, strict=True):
        begin = starts[turn.sequence]
        end = begin + len(given) + len(said)
        assert ids[begin:end] == [*given, *said]
        assert flags[end - len(said) : end] == [True] * len(said)
        trained[turn.sequence] += len(said)
    ends = [*starts[1:], len(ids)]
    assert [sum(flags[begin:end]) for begin, end in zip(starts, ends, strict=True)] == trained

    # a branch begins with the task, which it shares, and has the summary in the place of the work
    renderer = Renderer.of_model(server.model_dir)
    branches = [messages for messages, anew, _ in policy.heard if anew]
    firsts = [
        next(g for t, (g, _) in zip(rollout.turns, engine.exchanged, strict=True) if t.sequence == n) for n in (1, 2)
    ]
    assert firsts == [renderer.opening(messages) for messages in branches]
    assert [shared > len(renderer.opening(TASK)) // 2 for shared in rollout.shared.tolist()] == [False, True, True]  # type: ignore[union-attr]
    for messages in branches:
        assert messages[0] == TASK[0]
        assert messages[1]["content"].startswith("The sum is wrong.\n\nYou have worked on this task already")
    # the work of a sequence is within its point; only the request for a summary is behind it
    before = [
        [len(g) for t, (g, _) in zip(rollout.turns, engine.exchanged, strict=True) if t.sequence == n] for n in range(3)
    ]
    for lengths, point in zip(before, (300, 500, 500), strict=True):
        assert all(length <= point for length in lengths[:-1])
    assert (before[0][-1] > 300, before[1][-1] > 500) == (True, True)


async def test_a_summary_is_asked_for_before_the_context_is_full(server: Server) -> None:
    """The last results are given where there is room for a summary behind them, and are left out where there is not."""
    async with rollout_of(server, 200, 200, 900, 20, summary_points=[900], summary_room_tokens=100) as (
        work,
        policy,
        engine,
    ):
        rollout = await policy.conversation.rollout(0, Outcome(reward=1.0), seconds=1.0)
    assert rollout is not None
    assert (work.summaries, work.truncated, len(rollout.lengths)) == (1, False, 2)
    asked = next(
        messages
        for messages, _, fits in policy.heard
        if fits and messages[-1]["role"] == "user" and len(messages) == 2 and messages[0]["role"] == "tool"
    )
    assert asked[0]["content"] == "[left out: the conversation is too long]"
    assert max(len(given) + len(said) for given, said in engine.exchanged) <= WINDOW


async def test_room_for_a_summary_is_kept(server: Server) -> None:
    """Results that would fit, and leave less room than the settings name, are not given."""
    for room, summaries in ((200, 1), (1, 0)):
        async with rollout_of(server, 200, -60, summary_points=[990], summary_room_tokens=room) as (work, _, engine):
            assert work.summaries == summaries
            assert (max(len(given) for given, _ in engine.exchanged) > 900) == (not summaries)


async def test_without_summaries_left_the_context_is_the_limit(server: Server) -> None:
    async with rollout_of(server, *[200] * 9, summary_points=[300], max_summaries=1) as (work, policy, engine):
        assert (work.summaries, policy.conversation.declared_branches) == (1, 1)
        assert work.truncated
        assert max(len(given) for given, _ in engine.exchanged) > 500
    async with rollout_of(server, *[200] * 9) as (work, policy, _):
        assert (work.summaries, work.truncated, policy.conversation.declared_branches) == (0, True, 0)
