"""Texts and tokens of a recipe that end turns: what is sent, trained on, and given to the environment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from harness import make_recipe
from stub_engine import EOS, StubEngine, encode

from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines.answers import Generation
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Outcome
from hpcrl.rollouts.rendering import Parsed, Renderer
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler
from hpcrl.rollouts.sampling.stops import TurnStops

USER = ({"role": "user", "content": "1+1"},)
TOOL = ({"role": "tool", "content": "2"},)


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    write_character_tokenizer(tmp_path)
    return Renderer(ChatTokenizer(tmp_path))


class Bench:
    """A pool of one stub, and conversations that draw tokens as a test says."""

    def __init__(self, renderer: Renderer, stub: StubEngine, http: aiohttp.ClientSession) -> None:
        client = EngineClient(http, name="engine-0", url=stub.url)
        self.pool = EnginePool([client], counters=Counters(), request_timeout_s=5.0, max_retries=0)
        self.pool.engines[0].serve(3, proved_s=0.0)
        self.pool.engines[0].end_exchange()
        stub.version = "3"
        self.renderer, self.stub = renderer, stub

    def conversation(self, **sampling: Any) -> Conversation:
        recipe = make_recipe(Path(), rollouts={"sampling": {"max_new_tokens": 64, **sampling}})
        own = recipe.rollouts.sampling
        sampler = Sampler(self.pool, self.renderer, temperature=own.temperature, sampling=own, max_model_len=256)
        return Conversation(sampler, self.pool.session("group-0"), seed=11)

    def sent(self) -> dict[str, Any]:
        params: dict[str, Any] = self.stub.requests[-1]["sampling_params"]
        return params


@pytest.fixture
async def bench(renderer: Renderer) -> AsyncIterator[Bench]:
    stub = StubEngine()
    await stub.start()
    async with aiohttp.ClientSession() as http:
        yield Bench(renderer, stub, http)
    await stub.stop()


async def test_a_turn_ends_where_a_text_is_complete(bench: Bench, tmp_path: Path) -> None:
    """Also where the engine has sampled more; the template's end follows, and is not trained on."""
    turns = [[*encode("so </a>not this"), EOS], [*encode("2"), EOS]]
    bench.stub.answer = lambda token_ids, seed: turns[len(bench.stub.requests) - 1]
    conversation = bench.conversation(stop=["</a>", "never"])
    reply = await conversation.reply(USER)
    assert (reply.text, reply.finished, reply.tokens) == ("so ", True, len("so </a>"))
    assert (bench.sent()["stop"], bench.sent()["skip_special_tokens"]) == (["</a>", "never"], False)
    assert conversation.turns_ended_otherwise == 0
    assert (await conversation.reply(TOOL)).text == "2"
    assert conversation.turns_ended_otherwise == 1
    rollout = await conversation.rollout(0, Outcome(reward=1.0), seconds=0.5)
    assert rollout is not None
    whole = [*USER, {"role": "assistant", "content": "so </a>"}, *TOOL, {"role": "assistant", "content": "2"}]
    assert rollout.token_ids.tolist() == ChatTokenizer(tmp_path).render_ids(whole, add_generation_prompt=False)
    sampled = rollout.sampled.astype(bool)
    assert rollout.token_ids[sampled].tolist() == [*encode("so </a>"), *turns[1]]
    # as many numbers as tokens, each beside its own
    assert rollout.logprobs[sampled].tolist() == [-0.25 - token / 1024 for token in rollout.token_ids[sampled]]
    assert [turn.sampled for turn in rollout.turns] == [len("so </a>"), 2]


async def test_an_own_token_ends_a_turn_and_is_not_read(bench: Bench) -> None:
    (full_stop,) = encode(".")
    bench.stub.answer = lambda token_ids, seed: [*encode("yes.")]
    conversation = bench.conversation(stop_token_ids=[full_stop, EOS])
    reply = await conversation.reply(USER)
    assert (reply.text, reply.finished, reply.tokens) == ("yes", True, 4)
    assert bench.sent()["stop_token_ids"] == [EOS, full_stop]
    assert "stop" not in bench.sent()
    rollout = await conversation.rollout(0, Outcome(reward=1.0), seconds=0.5)
    assert rollout is not None
    assert rollout.token_ids[rollout.sampled == 1].tolist() == encode("yes.")


async def test_the_same_text_stays_where_another_token_ends_the_turn(bench: Bench) -> None:
    """An answer that is cut at its limit is not finished, and nothing is taken from its text."""
    bench.stub.answer = lambda token_ids, seed: [*encode("yes."), EOS]
    reply = await bench.conversation(stop_token_ids=[3]).reply(USER)
    assert (reply.text, reply.tokens) == ("yes.", 5)
    reply = await bench.conversation(stop=["</a>"], max_new_tokens=3).reply(USER)
    assert (reply.text, reply.finished) == ("yes", False)


async def test_all_that_shapes_the_distribution_is_reported(bench: Bench) -> None:
    bench.stub.answer = lambda token_ids, seed: [*encode("a"), EOS]
    await bench.conversation(temperature=0.6, top_p=0.9, top_k=7, min_p=0.125).reply(USER)
    sent = bench.sent()
    assert [sent[name] for name in ("temperature", "top_p", "top_k", "min_p")] == [0.6, 0.9, 7, 0.125]


async def test_a_seed_of_the_recipe_changes_the_noise_and_nothing_else(bench: Bench) -> None:
    bench.stub.answer = lambda token_ids, seed: [*encode("a"), EOS]
    seeds = []
    for own in (None, 0, 1, 1):
        conversation = bench.conversation(seed=own)
        await conversation.reply(USER)
        await conversation.reply(TOOL)
        assert conversation.seed == 11
        seeds.append(tuple(request["sampling_params"]["seed"] for request in bench.stub.requests[-2:]))
    assert len({seed for pair in seeds for seed in pair}) == 6
    assert seeds[2] == seeds[3]


def generation(text: str, *, rows: int | None = None, finish_reason: str = "length") -> Generation:
    ids = np.array(encode(text), np.int32)
    return Generation(
        token_ids=ids,
        logprobs=-np.arange(len(ids), dtype=np.float32),
        versions=np.arange(len(ids), dtype=np.int32),
        finish_reason=finish_reason,
        experts=None if rows is None else np.arange(rows * 2, dtype=np.uint8).reshape(rows, 1, 2),
    )


def stops_of(renderer: Renderer, **sampling: Any) -> TurnStops:
    return TurnStops(renderer, make_recipe(Path(), rollouts={"sampling": sampling}).rollouts.sampling)


@pytest.mark.parametrize("start", [0, 3])
def test_all_columns_are_cut_at_the_same_token(renderer: Renderer, start: int) -> None:
    """Rows of experts begin anywhere in the prompt, and lack the last token."""
    rows = start + len("ab--cd") - 1
    cut = stops_of(renderer, stop=["--"]).cut(generation("ab--cd", rows=rows))
    assert cut.token_ids.tolist() == encode("ab--")
    assert (cut.logprobs.tolist(), cut.versions.tolist()) == ([0, -1, -2, -3], [0, 1, 2, 3])
    assert cut.finish_reason == "stop"
    assert cut.experts is not None
    assert len(cut.experts) == start + len("ab--") - 1


def test_the_first_of_several_texts_ends_the_turn(renderer: Renderer) -> None:
    stops = stops_of(renderer, stop=["cd", "b", "abcdef"])
    assert stops.cut(generation("abcdef")).token_ids.tolist() == encode("ab")
    whole = generation("a-c-d")
    assert stops.cut(whole) is whole
    assert stops_of(renderer).cut(whole) is whole


def test_a_text_of_control_tokens_ends_a_turn(renderer: Renderer) -> None:
    (user,) = renderer.opening([{"role": "user", "content": "x"}])[:1]
    answer = generation("ab")
    ids = np.concatenate([answer.token_ids, [user], answer.token_ids]).astype(np.int32)
    versions = np.zeros(5, np.int32)
    long = Generation(token_ids=ids, logprobs=np.zeros(5, np.float32), versions=versions, finish_reason="length")
    assert stops_of(renderer, stop=["<|user|>"]).cut(long).token_ids.tolist() == [*encode("ab"), user]


def test_thinking_is_cut_where_the_text_has_no_stop(renderer: Renderer) -> None:
    stops = stops_of(renderer, stop=["END"])
    (last,) = encode("D")
    assert stops.without_stop(Parsed("xEND", "y"), last) == Parsed("x", "y")
    assert stops.without_stop(Parsed("", "so END"), last) == Parsed("", "so ")
    assert stops.without_stop(Parsed("nothing", "here"), last) == Parsed("nothing", "here")
    # a model's own end: the text is the model's
    assert stops.without_stop(Parsed("xEND"), EOS) == Parsed("xEND")
