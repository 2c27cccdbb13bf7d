"""Token ids of conversations, and what goes over the wire."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from harness import make_recipe
from stub_engine import EOS, StubEngine, encode

from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Group, StoredRollout, decode_rollout, encode_rollout
from hpcrl.rollouts.engines.client import EngineClient, EngineError
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Outcome, build_environments
from hpcrl.rollouts.environments.data_order import DataOrder, heldout_shares
from hpcrl.rollouts.ledger.state import DispatchedGroup, OrchestratorState
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler

USER = ({"role": "user", "content": "1+1"},)
TOOL = ({"role": "tool", "content": "2"},)


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    write_character_tokenizer(tmp_path)
    return Renderer(ChatTokenizer(tmp_path))


def test_pieces_are_those_of_the_whole(renderer: Renderer, tmp_path: Path) -> None:
    said = [*encode("run 1+1"), EOS]
    pieces = renderer.opening(USER) + said + renderer.extension(TOOL, ended_by=EOS).token_ids
    whole = [*USER, {"role": "assistant", "content": "run 1+1"}, *TOOL]
    assert pieces == ChatTokenizer(tmp_path).render_ids(whole, add_generation_prompt=True)


def test_a_line_break_after_the_end_token_is_kept(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{{ '\\n' }}{% endfor %}<|assistant|>"
    (tmp_path / "chat_template.jinja").write_text(template)
    renderer = Renderer(ChatTokenizer(tmp_path))
    assert renderer.full_text(renderer.extension(TOOL, ended_by=EOS).token_ids) == "\n<|tool|>2<|end|>\n<|assistant|>"


def test_a_template_that_hides_replies_is_refused(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(ValueError, match="does not end replies"):
        Renderer(ChatTokenizer(tmp_path)).extension(TOOL, ended_by=EOS)


class Bench:
    """A pool of one stub and what a conversation needs."""

    def __init__(self, renderer: Renderer, stub: StubEngine, http: aiohttp.ClientSession) -> None:
        client = EngineClient(http, name="engine-0", url=stub.url)
        self.counters = Counters()
        self.pool = EnginePool([client], counters=self.counters, request_timeout_s=5.0, max_retries=0)
        self.pool.engines[0].serve(3, proved_s=0.0)
        self.pool.engines[0].end_exchange()
        stub.version = "3"
        self.renderer = renderer

    def conversation(self, *, max_new_tokens: int = 32, max_model_len: int = 256) -> Conversation:
        recipe = make_recipe(Path(), rollouts={"sampling": {"max_new_tokens": max_new_tokens}})
        sampler = Sampler(
            self.pool,
            self.renderer,
            temperature=1.0,
            sampling=recipe.rollouts.sampling,
            max_model_len=max_model_len,
        )
        return Conversation(sampler, self.pool.session("group-0"), seed=11)


@pytest.fixture
async def stub() -> Any:
    engine = StubEngine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def bench(renderer: Renderer, stub: StubEngine) -> Any:
    async with aiohttp.ClientSession() as http:
        yield Bench(renderer, stub, http)


async def test_one_sequence_with_exact_ids(bench: Bench, stub: StubEngine, tmp_path: Path) -> None:
    # "run" as a text has another tokenization than these ids: they must stay as they are
    turns = [[*encode("run 1+1"), EOS], [*encode("answer 2"), EOS]]
    stub.answer = lambda token_ids, seed: turns[len(stub.requests) - 1]
    conversation = bench.conversation()
    assert (await conversation.reply(USER)).text == "run 1+1"
    stub.version = "4"
    assert (await conversation.reply(TOOL)).text == "answer 2"
    rollout = await conversation.rollout(2, Outcome(reward=1.0), seconds=0.5)
    assert rollout is not None
    whole = [*USER, {"role": "assistant", "content": "run 1+1"}, *TOOL, {"role": "assistant", "content": "answer 2"}]
    assert rollout.token_ids.tolist() == ChatTokenizer(tmp_path).render_ids(whole, add_generation_prompt=False)
    assert stub.requests[1]["token_ids"] == rollout.token_ids.tolist()[: -len(turns[1])]
    sampled = rollout.sampled.astype(bool)
    assert rollout.token_ids[sampled].tolist() == turns[0] + turns[1]
    assert rollout.versions[sampled].tolist() == [3] * len(turns[0]) + [4] * len(turns[1])
    assert (rollout.first_version, rollout.last_version) == (3, 4)
    # what a simulation replays: tokens before each request and in its answer, and who waited for whom
    assert [turn.sampled for turn in rollout.turns] == [len(turn) for turn in turns]
    assert sum(turn.said + turn.sampled for turn in rollout.turns) == len(rollout.token_ids)
    assert all(turn.wait_s >= 0 and turn.reply_s > 0 for turn in rollout.turns)
    request = stub.requests[0]
    assert (request["cache_salt"], request["session"]) == ("3", "group-0")
    assert stub.requests[1]["cache_salt"] == "3"
    params = [r["sampling_params"] for r in stub.requests]
    assert params[0]["seed"] != params[1]["seed"]
    assert {**params[0], "seed": 0} == {
        "temperature": 1.0,
        "max_tokens": 32,
        "seed": 0,
        "stop_token_ids": [EOS],
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "logprobs": 1,
    }


async def test_a_turn_says_how_long_the_environment_and_the_engine_took(
    bench: Bench, stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the environment: since it had the reply before, or since the beginning."""
    clock = [100.0]
    module = "hpcrl.rollouts.sampling.turn_sampler.time"
    monkeypatch.setattr(module, SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 5.0))

    def answer(_: object, __: object) -> list[int]:
        clock[0] += 4.0
        return [*encode("abc"), EOS]

    stub.answer = answer
    conversation = bench.conversation()
    for wait_s in (1.5, 20.0):
        clock[0] += wait_s
        await conversation.reply(USER if wait_s < 2 else TOOL)
    rollout = await conversation.rollout(0, Outcome(reward=1.0), seconds=9.0)
    assert rollout is not None
    assert [(turn.wait_s, turn.reply_s) for turn in rollout.turns] == [(1.5, 4.0), (20.0, 4.0)]
    assert (rollout.seconds, rollout.ended_s) == (9.0, 5.0)


async def test_messages_after_the_last_reply_are_not_trained_on(bench: Bench, stub: StubEngine) -> None:
    stub.answer = lambda token_ids, seed: [*encode("abc"), EOS]
    conversation = bench.conversation(max_model_len=24)
    await conversation.reply(USER)
    reply = await conversation.reply(({"role": "tool", "content": "a long result of a tool"},))
    assert not reply.finished
    rollout = await conversation.rollout(0, Outcome(reward=0.0), seconds=0.0)
    assert rollout is not None
    assert rollout.sampled[-1] == 1
    with pytest.raises(ValueError, match="cannot be followed"):
        await conversation.reply(TOOL)


async def test_a_cut_reply_is_not_finished(bench: Bench, stub: StubEngine) -> None:
    stub.answer = lambda token_ids, seed: [*encode("abcdef"), EOS]
    reply = await bench.conversation(max_new_tokens=3).reply(USER)
    assert (reply.text, reply.finished, reply.tokens) == ("abc", False, 3)


async def test_no_room_at_all(bench: Bench) -> None:
    conversation = bench.conversation(max_model_len=4)
    assert not (await conversation.reply(USER)).finished
    assert await conversation.rollout(0, Outcome(reward=0.0), seconds=0.0) is None


async def test_an_engine_without_versions_is_refused(bench: Bench, stub: StubEngine) -> None:
    stub.version = "default"
    with pytest.raises(EngineError, match="weights 'default', which the engine was not given"):
        await bench.conversation().reply(USER)


def test_data_order_is_stable_and_follows_weights(tmp_path: Path) -> None:
    environments = [{"name": "a", "kind": "words", "weight": 3.0}, {"name": "b", "kind": "words"}]
    recipe = make_recipe(tmp_path, environments=environments)
    order = DataOrder(recipe, build_environments(recipe))
    names = [order.task(index).environment.name for index in range(2000)]
    assert names.count("a") / 2000 == pytest.approx(0.75, abs=0.04)
    again = DataOrder(recipe, build_environments(recipe))
    assert [order.task(i).prompt_index for i in range(50)] == [again.task(i).prompt_index for i in range(50)]
    assert len({order.rollout_seed(index, member) for index in range(100) for member in range(8)}) == 800


def test_heldout_shares() -> None:
    assert heldout_shares([1.0, 1.0], 64) == [32, 32]
    assert heldout_shares([3.0, 1.0], 10) == [8, 2]
    assert heldout_shares([100.0, 1.0, 1.0], 4) == [3, 1, 1]


async def test_states_survive_encoding(bench: Bench, stub: StubEngine) -> None:
    conversation = bench.conversation()
    await conversation.reply(({"role": "user", "content": "reverse stone"},))
    rollout = await conversation.rollout(0, Outcome(reward=0.5, parts={"exact": 0.0}), seconds=1.0)
    assert rollout is not None
    group = Group(
        index=4,
        environment="words",
        prompt_index=9,
        rollouts=[StoredRollout.of(rollout, PayloadPlace("nowhere", 0, 0, ""))],
    )
    state = OrchestratorState(
        step=3, seed=1, group_size=4, next_index=9, restart=[5], finished=[group], counters=Counters(finished=2)
    )
    data = state.encode()
    back = OrchestratorState.decode(data)
    assert back.encode() == data
    assert (back.finished, back.logged) == ([], [DispatchedGroup(4, "words", 9, 1)])


async def test_rollouts_survive_encoding(bench: Bench) -> None:
    conversation = bench.conversation()
    await conversation.reply(({"role": "user", "content": "reverse stone"},))
    rollout = await conversation.rollout(2, Outcome(reward=0.5, parts={"exact": 0.0}), seconds=1.0)
    assert rollout is not None
    back = decode_rollout(b"".join(encode_columns(*encode_rollout(rollout))))
    for name in rollout.__struct_fields__:
        was, became = getattr(rollout, name), getattr(back, name)
        assert was.tobytes() == became.tobytes() if isinstance(was, np.ndarray) else was == became, name
