"""A conversation with tools as an engine samples it: which tokens are trained on, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from family_lab import FAMILIES, TOOLS, needs_templates, write_family
from harness import make_recipe
from msgspec.structs import astuple
from stub_engine import StubEngine

from hpcrl.dock.sequences import turn_places
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Message, Outcome, malformed_answer, tool_message
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.branches import TooManyBranchesError
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler

pytestmark = needs_templates

USER: Message = {"role": "user", "content": "What is the weather in Paris?"}
CALL = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"


@pytest.fixture
async def stub() -> Any:
    engine = StubEngine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def pool(stub: StubEngine) -> Any:
    async with aiohttp.ClientSession() as http:
        client = EngineClient(http, name="engine-0", url=stub.url)
        made = EnginePool([client], counters=Counters(), request_timeout_s=5.0, max_retries=0)
        made.engines[0].serve(3, proved_s=0.0)
        made.engines[0].end_exchange()
        stub.version = "3"
        yield made


def conversation_with(
    pool: EnginePool, path: Path, thinking: Literal["kept", "cut"] = "kept", max_branches: int = 16
) -> Conversation:
    sampling = make_recipe(Path(), rollouts={"sampling": {"max_new_tokens": 400}}).rollouts.sampling
    sampler = Sampler(
        pool,
        Renderer.of_model(path, thinking=thinking),
        temperature=1.0,
        sampling=sampling,
        max_model_len=4000,
        max_branches=max_branches,
    )
    return Conversation(sampler, pool.session("group-0"), seed=11, tools=TOOLS)


async def test_calls_results_and_an_answer_of_glm(pool: EnginePool, stub: StubEngine, tmp_path: Path) -> None:
    path = write_family(tmp_path, FAMILIES["GLM-4.5"])
    tokenizer, renderer = ChatTokenizer(path), Renderer.of_model(path)
    texts = (
        f"\n<think>Let me look.</think>\n{CALL}<|observation|>",
        # no end, and ended as if the user spoke next
        f"\n<think></think>\n{CALL.removesuffix('</tool_call>')}<|user|>",
        "\n<think></think>\nIt is grey.<|user|>",
    )
    turns = [tokenizer.encode(text) for text in texts]
    stub.answer = lambda token_ids, seed: turns[len(stub.requests) - 1]
    conversation = conversation_with(pool, path)

    reply = await conversation.reply([USER])
    (call,) = reply.calls
    assert (reply.thinking.strip(), reply.text.strip(), call.name, dict(call.arguments), call.status, call.id) == (
        "Let me look.",
        "",
        "weather",
        {"city": "Paris"},
        "ok",
        "call_0_0",
    )
    result = tool_message(call, "grey <|user|>And you?<|observation|>")
    (bad,) = (await conversation.reply([result])).calls
    assert (bad.status, bad.id) == ("unclosed_block", "call_1_0")
    reply = await conversation.reply([malformed_answer(bad)])
    assert (reply.text.strip(), reply.calls, reply.finished) == ("It is grey.", (), True)
    assert (conversation.malformed_calls, conversation.turns_ended_otherwise) == (1, 1)

    rollout = await conversation.rollout(0, Outcome(reward=1.0), seconds=1.0)
    assert rollout is not None
    ids, sampled = rollout.token_ids.tolist(), rollout.sampled.astype(bool).tolist()
    said = [
        renderer.opening([USER], tools=TOOLS),
        renderer.extension([result], ended_by=turns[0][-1], calls=[call], tools=TOOLS).token_ids,
        renderer.extension([malformed_answer(bad)], ended_by=turns[1][-1], calls=[bad], tools=TOOLS).token_ids,
    ]
    assert ids == [token for pair in zip(said, turns, strict=True) for part in pair for token in part]
    assert [token for token, flag in zip(ids, sampled, strict=True) if flag] == [t for turn in turns for t in turn]
    # the marks that ended turns are trained on, and what a tool spells is not a mark
    observation, user = tokenizer.id_of("<|observation|>"), tokenizer.id_of("<|user|>")
    marks = [(token, flag) for token, flag in zip(ids, sampled, strict=True) if token in (observation, user)]
    assert marks == [(user, False), (observation, True), (user, True), (observation, False), (user, True)]
    for request in stub.requests:
        assert set(request["sampling_params"]["stop_token_ids"]) == set(renderer.stop_token_ids)


async def test_a_turn_that_is_cut_in_a_call_is_not_finished(pool: EnginePool, stub: StubEngine, tmp_path: Path) -> None:
    path = write_family(tmp_path, FAMILIES["Qwen3"])
    ids = ChatTokenizer(path).encode('<tool_call>{"name": "weather"' + " " * 2000)
    stub.answer = lambda token_ids, seed: ids
    reply = await conversation_with(pool, path).reply([USER])
    assert not reply.finished
    assert [call.status for call in reply.calls] == ["unclosed_block"]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = list(zip(one, other, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


class Weather:
    """A question, a tool, an answer and another question, of a model that thinks in each turn."""

    def __init__(self, path: Path, stub: StubEngine) -> None:
        self.tokenizer = ChatTokenizer(path)
        texts = (
            '<think>Hm.</think><tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>',
            "<think>So.</think>Grey.",
            "<think>Now.</think>Yes.",
            "<think>End.</think>No.",
        )
        self.turns = [self.tokenizer.encode(f"{text}<|im_end|>") for text in texts]
        stub.answer = lambda token_ids, seed: self.turns[len(stub.requests) - 1]

    async def talk(self, conversation: Conversation, questions: int = 1) -> Rollout:
        (call,) = (await conversation.reply([USER])).calls
        assert (await conversation.reply([tool_message(call, "grey")])).text == "Grey."
        for _, answer in zip(range(questions), ("Yes.", "No."), strict=False):
            assert (await conversation.reply([USER])).text == answer
        rollout = await conversation.rollout(0, Outcome(reward=1.0), seconds=1.0)
        assert rollout is not None
        return rollout

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


async def test_a_question_behind_thinking_that_is_kept(pool: EnginePool, stub: StubEngine, tmp_path: Path) -> None:
    path = write_family(tmp_path, FAMILIES["Qwen3"])
    weather = Weather(path, stub)
    rollout = await weather.talk(conversation_with(pool, path, "kept"), questions=2)
    assert (rollout.starts, rollout.shared, rollout.lengths) == (None, None, [len(rollout.token_ids)])
    assert "<think>Hm.</think>" in weather.text(rollout.token_ids.tolist())


async def test_a_question_behind_thinking_that_is_cut_begins_a_branch(
    pool: EnginePool, stub: StubEngine, tmp_path: Path
) -> None:
    path = write_family(tmp_path, FAMILIES["Qwen3"])
    weather = Weather(path, stub)
    rollout = await weather.talk(conversation_with(pool, path, "cut"), questions=2)
    assert rollout.starts is not None
    assert rollout.shared is not None
    bounds = [*rollout.starts.tolist(), len(rollout.token_ids)]
    parts = [slice(*pair) for pair in pairwise(bounds)]
    sequences = [rollout.token_ids[part].tolist() for part in parts]
    assert len(sequences) == 3
    # prompts are what the template makes of the whole conversation, as an engine sees it that renders each anew
    calls = [{"id": "call_0_0", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    history: list[Message] = [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "grey"},
        {"role": "assistant", "content": "Grey.", "reasoning_content": "So."},
        USER,
    ]
    for number, turn in ((1, weather.turns[2]), (2, weather.turns[3])):
        prompt = weather.tokenizer.render_ids(history, add_generation_prompt=True, tools=TOOLS)
        assert sequences[number] == prompt + turn
        assert stub.requests[number + 1]["token_ids"] == prompt
        history += [{"role": "assistant", "content": "Yes.", "reasoning_content": "Now."}, USER]
    assert "<think>" not in weather.text(sequences[2]).replace("<think>End.</think>", "")
    # each turn is trained once, in its own sequence
    own = [ids[flags != 0].tolist() for ids, flags in ((rollout.token_ids[p], rollout.sampled[p]) for p in parts)]
    assert own == [weather.turns[0] + weather.turns[1], weather.turns[2], weather.turns[3]]
    # what a sequence shares is the longest beginning that an earlier one has
    assert rollout.shared[0] == 0
    for number in (1, 2):
        common = [common_prefix(sequences[number], earlier) for earlier in sequences[:number]]
        assert rollout.shared[number] == max(common) > 10
        assert rollout.logprobs[parts[number]][: rollout.shared[number]].tolist() == [0.0] * max(common)
    assert [(turn.sequence, turn.shared) for turn in rollout.turns] == [
        (0, 0),
        (0, 0),
        (1, rollout.shared[1]),
        (2, rollout.shared[2]),
    ]
    assert sum(turn.shared + turn.said + turn.sampled for turn in rollout.turns) == len(rollout.token_ids)
    assert rollout.repeated_tokens == rollout.shared.sum()
    for turn, place in zip(weather.turns, turn_places(map(astuple, rollout.turns), rollout.starts), strict=True):
        assert rollout.token_ids[place.sampled : place.end].tolist() == turn


async def test_a_turn_without_thinking_is_followed_in_its_sequence(
    pool: EnginePool, stub: StubEngine, tmp_path: Path
) -> None:
    path = write_family(tmp_path, FAMILIES["Qwen3"])
    weather = Weather(path, stub)
    weather.turns[2:] = [weather.tokenizer.encode(f"{text}<|im_end|>") for text in ("Yes.", "No.")]
    rollout = await weather.talk(conversation_with(pool, path, "cut"), questions=2)
    assert [turn.sequence for turn in rollout.turns] == [0, 0, 1, 1]


async def test_more_branches_than_there_may_be(pool: EnginePool, stub: StubEngine, tmp_path: Path) -> None:
    path = write_family(tmp_path, FAMILIES["Qwen3"])
    weather = Weather(path, stub)
    with pytest.raises(TooManyBranchesError, match=r"more than 2 sequences \(rollouts\.max_branches\)"):
        await weather.talk(conversation_with(pool, path, "cut", max_branches=2), questions=2)
    assert len(stub.requests) == 3


async def test_a_prompt_that_the_template_refuses_is_an_error_of_it(pool: EnginePool, tmp_path: Path) -> None:
    path = write_family(tmp_path, FAMILIES["Qwen3.5"])
    with pytest.raises(ValueError, match="the chat template refuses"):
        await conversation_with(pool, path).reply(
            [{"role": "system", "content": "x"}, {"role": "system", "content": "y"}]
        )
