"""A conversation with tools as an engine samples it: which tokens are trained on, and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from family_lab import FAMILIES, TOOLS, needs_templates, write_family
from harness import make_recipe
from stub_engine import StubEngine

from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Message, Outcome, malformed_answer, tool_message
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler
from hpcrl.rollouts.telemetry.counters import Counters

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


def conversation_with(pool: EnginePool, path: Path, thinking: Literal["kept", "cut"] = "kept") -> Conversation:
    sampling = make_recipe(Path(), rollouts={"sampling": {"max_new_tokens": 400}}).rollouts.sampling
    sampler = Sampler(
        pool, Renderer.of_model(path, thinking=thinking), temperature=1.0, sampling=sampling, max_model_len=4000
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
    # the marks that ended turns are trained on, and what a tool spells is no mark
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


@pytest.mark.parametrize("thinking", ["kept", "cut"])
async def test_a_question_behind_thinking(
    thinking: Literal["kept", "cut"], pool: EnginePool, stub: StubEngine, tmp_path: Path
) -> None:
    path = write_family(tmp_path, FAMILIES["Qwen3"])
    tokenizer = ChatTokenizer(path)
    turns = ['<think>Hm.</think><tool_call>{"name": "weather", "arguments": {}}</tool_call>', "Grey.", "Yes."]
    stub.answer = lambda token_ids, seed: tokenizer.encode(f"{turns[len(stub.requests) - 1]}<|im_end|>")
    conversation = conversation_with(pool, path, thinking)
    (call,) = (await conversation.reply([USER])).calls
    assert (await conversation.reply([tool_message(call, "grey")])).text == "Grey."
    if thinking == "cut":
        with pytest.raises(ValueError, match=r"model\.chat\.thinking is cut: .*set model\.chat\.thinking: kept"):
            await conversation.reply([USER])
        assert len(stub.requests) == 2
    else:
        assert (await conversation.reply([USER])).text == "Yes."
        rollout = await conversation.rollout(0, Outcome(reward=1.0), seconds=1.0)
        assert rollout is not None
        assert "<think>Hm.</think>" in tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=False)


async def test_a_prompt_that_the_template_refuses_is_an_error_of_it(pool: EnginePool, tmp_path: Path) -> None:
    path = write_family(tmp_path, FAMILIES["Qwen3.5"])
    with pytest.raises(ValueError, match="the chat template refuses"):
        await conversation_with(pool, path).reply(
            [{"role": "system", "content": "x"}, {"role": "system", "content": "y"}]
        )
