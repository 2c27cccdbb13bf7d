"""Questions with tools: rows with tools and calls, and the checker that compares calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dataset_testing import config_of, make_dataset, write_jsonl
from family_lab import FAMILIES, needs_templates, write_family
from harness import make_recipe
from stub_engine import StubEngine

from hpcrl.config.recipe import Recipe
from hpcrl.config.rewards import ToolCallReward
from hpcrl.errors import ConfigError
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Message, Reply
from hpcrl.rollouts.environments.base import CallStatus, ToolCall
from hpcrl.rollouts.environments.dataset.partition import read_partition
from hpcrl.rollouts.environments.rewards.tool_calls import ToolCallCheck
from hpcrl.rollouts.environments.task_check import check_tasks
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler

CALLS = {"kind": "tool_call"}
ROME = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}
COLUMNS = {"tools": "functions"}


def tool(name: str = "weather", **properties: Any) -> dict[str, Any]:
    given = properties or {"city": {"type": "string"}, "days": {"type": "integer"}}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": given}}}


def rows(count: int = 30, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"Weather of town {i}?", "functions": [tool()], "answer": ROME, **more} for i in range(count)]


class Says:
    """A policy with one reply."""

    def __init__(self, *calls: ToolCall, text: str = "", finished: bool = True) -> None:
        self.seed, self._reply = 0, Reply(text, finished, calls=calls)

    async def reply(self, messages: Any) -> Reply:
        return self._reply


def call(name: str = "weather", status: CallStatus = "ok", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments or {"city": "Rome", "days": 2}, "call_0_0", status)


async def test_a_prompt_offers_the_tools_of_its_row(tmp_path: Path) -> None:
    given = rows(10) + rows(10, functions=json.dumps([tool("look", x={"type": "integer"})]), answer=[])
    for number, row in enumerate(given):
        row["prompt"] = f"Question {number}"
    environment = make_dataset(write_jsonl(tmp_path / "q.jsonl", given), CALLS, columns=COLUMNS)
    prompts = [environment.prompt("train", index) for index in range(40)]
    assert {prompt.tools[0]["function"]["name"] for prompt in prompts} == {"weather", "look"}
    for prompt in prompts:
        right = prompt.data.answer == "[]"
        assert (prompt.tools[0]["function"]["name"] == "look") == right
        assert (await environment.rollout(prompt, Says())).reward == right
        assert (await environment.rollout(prompt, Says(call()))).reward == (not right)
        assert (await environment.rollout(prompt, Says(finished=False))).parts == {"tool_call": 0.0, "unfinished": 1.0}
        with pytest.raises(NotImplementedError):
            environment.demonstration(prompt, correct=True, rng=None)  # type: ignore[arg-type]
    environment.close()


BOTH = [call(), call(city="Oslo", days=1)]
WANTED = [ROME, {"function": {"name": "weather", "arguments": '{"days": 1, "city": "Oslo"}'}}]


@pytest.mark.parametrize(
    ("said", "wanted", "config", "score"),
    [
        ([call()], ROME, {}, 1),
        ([call()], [ROME], {}, 1),
        ([call(city="Rome", days=2.0)], ROME, {}, 1),
        ([call(city="rome", days=2)], ROME, {}, 0),
        ([call(city="Rome", days="2")], ROME, {}, 0),
        ([call(city="Rome")], ROME, {}, 0),
        ([call(city="Rome", days=2, unit="C")], ROME, {}, 0),
        ([call("whether")], ROME, {}, 0),
        ([call(status="unknown_tool")], ROME, {}, 0),
        ([call(status="invalid_json")], ROME, {}, 0),
        ([call(), call()], ROME, {}, 0),
        ([call(), call()], ROME, {"score": "share"}, 0.5),
        (BOTH, WANTED, {}, 1),
        (BOTH[::-1], WANTED, {}, 1),
        (BOTH[::-1], WANTED, {"ordered": True}, 0),
        (BOTH, WANTED, {"ordered": True}, 1),
        (BOTH[:1], WANTED, {}, 0),
        (BOTH[:1], WANTED, {"score": "share"}, 0.5),
        ([call(), call()], WANTED, {"score": "share"}, 0.5),
        ([call("f", x=True)], {"name": "f", "arguments": {"x": 1}}, {}, 0),
        ([call("f", x=1)], {"name": "f", "arguments": {"x": True}}, {}, 0),
        ([call("f", x=None)], {"name": "f", "arguments": {"x": 0}}, {}, 0),
        ([call("f", x=None)], {"name": "f", "arguments": {"x": None}}, {}, 1),
        ([call("f", x=None)], {"name": "f", "arguments": {}}, {}, 1),
        ([call("f", x={"y": 1})], {"name": "f", "arguments": {"x": {"y": 1, "z": None}}}, {}, 1),
        ([call("f", x=[None])], {"name": "f", "arguments": {"x": []}}, {}, 0),
        ([call("f", x=[1, {"y": [2]}])], {"name": "f", "arguments": {"x": [1, {"y": [2.0]}]}}, {}, 1),
        ([call("f", x=[1, {"y": [2]}])], {"name": "f", "arguments": {"x": [1, {"y": [2, 3]}]}}, {}, 0),
        ([call("f", x={"y": 1})], {"name": "f", "arguments": {"x": [1]}}, {}, 0),
        ([ToolCall("f", {}, "call_0_0")], {"name": "f"}, {}, 1),
        ([], [], {}, 1),
        ([call()], [], {}, 0),
        ([], ROME, {"score": "share"}, 0),
    ],
)
def test_scores(said: list[ToolCall], wanted: Any, config: dict[str, Any], score: float) -> None:
    check = ToolCallCheck(ToolCallReward(kind="tool_call", **config))
    assert check.score(Reply("", finished=True, calls=tuple(said)), json.dumps(wanted)) == score


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"functions": "hello"}, "column 'functions' is text, and no JSON list"),
        ({"functions": {"name": "weather"}}, "column 'functions' is not a list of tools"),
        ({"functions": [{"name": "weather"}]}, "tool 0: it is not {'type': 'function'"),
        ({"functions": [tool(), tool()]}, "has two tools 'weather'"),
        ({"answer": "Rome"}, "is no JSON of a call"),
        ({"answer": {"arguments": {}}}, "has a call that is not"),
        ({"answer": [{"name": "weather", "arguments": "{"}]}, "has a call of 'weather' whose arguments are no JSON"),
        ({"answer": None}, "column 'answer' is empty"),
    ],
)
def test_bad_rows(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [*rows(20), *rows(1, prompt="the bad one", **change)])
    with pytest.raises(ConfigError) as caught:
        make_dataset(path, CALLS, columns=COLUMNS)
    (finding,) = caught.value.findings
    assert "line 21: " in finding.what
    assert what in finding.what


def test_a_column_of_tools_must_be_there_and_may_be_empty(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [*rows(20), *rows(1, prompt="no tools", functions=None, answer=[])])
    make_dataset(path, CALLS, columns=COLUMNS).close()
    with pytest.raises(ConfigError, match="column 'tools' does not exist"):
        make_dataset(path, CALLS, columns={"tools": "tools"})


def test_the_same_question_with_other_tools_is_another_question(tmp_path: Path) -> None:
    same = {"prompt": "Which?"}
    path = write_jsonl(
        tmp_path / "q.jsonl",
        [*rows(20), *rows(1, **same), *rows(1, **same, answer=[]), *rows(1, **same, functions=[tool("look")])],
    )
    notes = read_partition(config_of(path, CALLS, columns=COLUMNS)).notes
    (note,) = notes
    assert note.startswith("1 rows have the prompt of another row, with another answer: line 2")
    assert {note[-7:], note.split(": ")[1][:7]} == {"line 21", "line 22"}


def test_tables_give_each_tool_the_keys_of_all_others(tmp_path: Path) -> None:
    """Rows of Parquet files: structures whose other keys are null."""
    import pyarrow
    import pyarrow.parquet

    given = rows(20)
    for row in given[::2]:
        row["functions"] = [tool("look", x={"type": "integer"})]
    for row in given:
        row["talk"] = [
            {"role": "user", "content": row.pop("prompt")},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": ROME}]},
            {"role": "tool", "content": "rain", "tool_call_id": "a"},
        ]
    path = tmp_path / "q.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), path)
    environment = make_dataset(path, CALLS, columns={**COLUMNS, "messages": "talk"}, held_out_share=0.3)
    tools = [environment.prompt("train", index).tools for index in range(30)]
    assert {frozenset(each[0]["function"]["parameters"]["properties"]) for each in tools} == {
        frozenset({"x"}),
        frozenset({"city", "days"}),
    }
    first, second, third = environment.prompt("train", 0).messages
    assert first["content"].startswith("Weather")
    assert second["tool_calls"] == [{"type": "function", "function": ROME, "id": "a"}]
    assert second["content"] == ""
    assert third == {"role": "tool", "content": "rain", "tool_call_id": "a"}
    environment.close()


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        ([], "has tool_calls that are []"),
        ("weather", "has tool_calls that are weather"),
        ([{"name": "weather"}], "has a call without the name of a function"),
        ([{"function": {"name": "weather", "arguments": "["}}], "has a call whose arguments are no JSON object"),
    ],
)
def test_bad_calls_of_a_conversation(tmp_path: Path, calls: Any, what: str) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    path = write_jsonl(tmp_path / "q.jsonl", rows(1, talk=[*talk, {"role": "user", "content": "b"}]))
    with pytest.raises(ConfigError) as caught:
        make_dataset(path, CALLS, columns={**COLUMNS, "messages": "talk"})
    assert f"message 2 of column 'talk' {what}" in caught.value.findings[0].what


def recipe_of(path: Path, model: Path, *rewards: dict[str, Any], **changes: Any) -> Recipe:
    environment = {"name": "asked", "kind": "dataset", "path": str(path), "rewards": list(rewards or [CALLS])}
    return make_recipe(model, environments=[{**environment, "columns": COLUMNS, **changes}])


def test_the_right_calls_are_played_before_a_run(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", rows())
    found = check_tasks(recipe_of(path, tmp_path), ["asked"], 3)["asked"]
    assert found["problems"] == []
    assert found["played"]["right"] == [1.0] * 6
    text = check_tasks(recipe_of(path, tmp_path, {"kind": "format", "pattern": "x"}, CALLS), ["asked"], 1)["asked"]
    assert text["problems"] == []


QWEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call><|im_end|>'


@pytest.fixture
async def pool() -> AsyncIterator[tuple[EnginePool, StubEngine]]:
    engine = StubEngine()
    await engine.start()
    async with aiohttp.ClientSession() as http:
        client = EngineClient(http, name="engine-0", url=engine.url)
        made = EnginePool([client], counters=Counters(), request_timeout_s=5.0, max_retries=0)
        made.engines[0].serve(3, proved_s=0.0)
        made.engines[0].end_exchange()
        engine.version = "3"
        yield made, engine
    await engine.stop()


@needs_templates
@pytest.mark.parametrize(("said", "reward"), [(QWEN, 1), (QWEN.replace("Rome", "Oslo"), 0), ("It rains.<|im_end|>", 0)])
async def test_a_model_that_calls_in_its_own_format(
    pool: tuple[EnginePool, StubEngine], tmp_path: Path, said: str, reward: float
) -> None:
    path = write_family(tmp_path / "model", FAMILIES["Qwen3"])
    tokenizer = ChatTokenizer(path)
    pool[1].answer = lambda token_ids, seed: tokenizer.encode(said)
    environment = make_dataset(write_jsonl(tmp_path / "q.jsonl", rows()), CALLS, columns=COLUMNS)
    prompt = environment.prompt("train", 0)
    sampling = make_recipe(Path(), rollouts={"sampling": {"max_new_tokens": 100}}).rollouts.sampling
    renderer = Renderer.of_model(path, thinking="kept")
    sampler = Sampler(pool[0], renderer, temperature=1.0, sampling=sampling, max_model_len=4000, max_branches=4)
    conversation = Conversation(sampler, pool[0].session("group-0"), seed=11, tools=prompt.tools)
    outcome = await environment.rollout(prompt, conversation)
    assert (outcome.reward, outcome.parts["tool_call"]) == (reward, reward)
    opening = tokenizer.decode(pool[1].requests[0]["token_ids"])
    question: Message = prompt.messages[0]
    assert question["content"] in opening
    assert '"name": "weather"' in opening
    environment.close()
