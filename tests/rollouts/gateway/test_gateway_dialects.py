"""Responses of OpenAI's newer API, by its own client, and Anthropic's messages: the same recorder behind both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from gateway_testing import GatewayBench, gateway_bench, sequences

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL: Any = {
    "type": "function",
    "name": "bash",
    "description": "Runs a command.",
    "parameters": SCHEMA,
    "strict": False,
}
CLAUDE_TOOL = {"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA}
SAID = [
    '<think>Hm.</think>Look:<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>',
    "<think>So.</think>There are two files.<|im_end|>",
]


async def is_one_sequence(bench: GatewayBench) -> None:
    """Both turns are in one sequence, as they were sampled, with the result of the tool between them."""
    ((ids, sampled),) = sequences(await bench.rollout())
    turns = [bench.tokenizer.encode(text) for text in SAID]
    assert [token for token, flag in zip(ids, sampled, strict=True) if flag] == turns[0] + turns[1]
    assert ids[: len(bench.prompts()[1])] == bench.prompts()[1]
    assert "a b" in bench.text(bench.prompts()[1])
    assert "Be short." in bench.text(bench.prompts()[0])


async def created(bench: GatewayBench, stream: bool, **given: Any) -> Any:
    """The response of OpenAI's client; of a stream the last event has it, and its parts say the same."""
    asked: dict[str, Any] = {"model": "policy", "tools": [TOOL], "instructions": "Be short.", **given}
    client = bench.client()
    if not stream:
        return await client.responses.create(**asked)
    texts, arguments, numbers, kinds = "", "", [], []
    async for event in await client.responses.create(**asked, stream=True):
        numbers.append(event.sequence_number)
        kinds.append(event.type)
        texts += event.delta if event.type == "response.output_text.delta" else ""
        arguments += event.delta if event.type == "response.function_call_arguments.delta" else ""
    assert numbers == list(range(len(numbers)))
    assert (kinds[0], kinds.count("response.output_item.added")) == ("response.created", len(event.response.output))
    assert texts == event.response.output_text
    assert arguments == "".join(each.arguments for each in event.response.output if each.type == "function_call")
    return event.response


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_by_the_client_of_openai(stream: bool, tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        bench.said = SAID
        history: list[Any] = [{"role": "user", "content": "List the files."}]
        first = await created(bench, stream, input=history, temperature=0.1)
        assert [each.type for each in first.output] == ["reasoning", "message", "function_call"]
        assert (first.status, first.output_text) == ("completed", "Look:")
        assert json.loads(first.output[2].arguments) == {"command": "ls"}
        history += [each.model_dump(exclude_none=True) for each in first.output]
        history.append({"type": "function_call_output", "call_id": first.output[2].call_id, "output": "a b"})
        second = await created(bench, stream, input=history)
        assert second.output_text == "There are two files."
        assert second.usage.output_tokens == len(bench.tokenizer.encode(SAID[1]))
        assert second.usage.input_tokens == len(bench.prompts()[1])
        await is_one_sequence(bench)
        assert bench.counters.gateway_overrides == 1


async def test_what_responses_cannot_do_is_refused(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path, max_model_len=200) as bench:
        for given in (
            {"previous_response_id": "resp_1"},
            {"tools": [{"type": "web_search"}]},
            {"input": [{"type": "x"}]},
        ):
            with pytest.raises(openai.BadRequestError, match="not served"):
                await created(bench, False, **{"input": "Hello.", **given})
        for parameters in ("abc", [1, 2]):
            with pytest.raises(openai.BadRequestError, match="must be an object"):
                await created(bench, False, input="Hello.", tools=[{**TOOL, "parameters": parameters}])
        with pytest.raises(openai.BadRequestError) as error:
            await created(bench, False, input="x" * 500)
        assert error.value.code == "context_length_exceeded"
    async with gateway_bench(tmp_path / "cut", max_new_tokens=4) as bench:
        bench.said = SAID
        cut = await created(bench, False, input="Hello.")
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def messages(bench: GatewayBench, stream: bool = False, **given: Any) -> tuple[int, Any]:
    """Status and answer of a request as Anthropic's clients send it: the key stands in a header of its own."""
    asked = {"model": "policy", "max_tokens": 500, "system": "Be short.", "tools": [CLAUDE_TOOL], **given}
    headers = {"x-api-key": bench.endpoint.key, "anthropic-version": "2023-06-01"}
    url = f"{bench.endpoint.url}/messages"
    body = {**asked, "stream": stream}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
        if not stream:
            return answer.status, await answer.json()
        return answer.status, whole(await answer.text())


def whole(text: str) -> dict[str, Any]:
    """Put the events of a stream together."""
    message: dict[str, Any] = {}
    for event in text.strip().split("\n\n"):
        name, _, data = event.partition("\ndata: ")
        told = json.loads(data)
        assert name == f"event: {told['type']}"
        match told["type"]:
            case "message_start":
                message = told["message"]
            case "content_block_start":
                assert told["index"] == len(message["content"])
                message["content"].append({**told["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = message["content"][told["index"]], told["delta"]
                field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
                block[field] += delta["partial_json" if field == "json" else field]
            case "content_block_stop":
                block = message["content"][told["index"]]
                if arguments := block.pop("json"):
                    block["input"] = json.loads(arguments)
            case "message_delta":
                message |= told["delta"] | {"usage": told["usage"]}
    assert told == {"type": "message_stop"}
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_of_anthropic(stream: bool, tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        bench.said = SAID
        history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "List the files."}]}]
        status, first = await messages(bench, stream, messages=history)
        assert (status, first["stop_reason"], first["role"]) == (200, "tool_use", "assistant")
        thought, text, call = first["content"]
        assert (thought["thinking"], text["text"]) == ("Hm.", "Look:")
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "bash", {"command": "ls"})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "a b"}]}
        history += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        _, second = await messages(bench, stream, messages=history)
        assert (second["content"][-1]["text"], second["stop_reason"]) == ("There are two files.", "end_turn")
        sampled = len(bench.tokenizer.encode(SAID[1]))
        assert second["usage"] == {"input_tokens": len(bench.prompts()[1]), "output_tokens": sampled}
        await is_one_sequence(bench)


async def test_errors_in_the_words_of_anthropic(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path, max_model_len=200) as bench:
        user = {"role": "user", "content": "x" * 500}
        status, answer = await messages(bench, messages=[user])
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
        assert answer["error"]["message"].startswith("prompt is too long:")
        for given in ({"messages": [{"role": "king", "content": "x"}]}, {"messages": 3}, {"messages": []}):
            assert (await messages(bench, **given))[0] == 400
        image = {"role": "user", "content": [{"type": "image", "source": {}}]}
        status, answer = await messages(bench, messages=[image])
        assert (status, "other than text" in answer["error"]["message"]) == (400, True)
        assert not bench.stub.requests


@pytest.mark.parametrize(
    "given",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "mine"},
    ],
    ids=lambda given: given["type"],
)
async def test_tools_without_a_schema_of_their_own_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        status, answer = await messages(bench, messages=[{"role": "user", "content": "x"}], tools=[CLAUDE_TOOL, given])
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert f"tools of the type '{given['type']}' are not served" in answer["error"]["message"]
        assert not bench.stub.requests


async def test_tools_of_a_program_are_read_with_care(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        user = [{"role": "user", "content": "x"}]
        for tool in ({"name": 3}, {"input_schema": SCHEMA}, {**CLAUDE_TOOL, "input_schema": "x"}, {"type": ["x"]}):
            assert (await messages(bench, messages=user, tools=[tool]))[0] == 400
        status, answer = await messages(bench, messages=user, mcp_servers=[{"type": "url", "name": "mine"}])
        assert (status, "mcp_servers are not served" in answer["error"]["message"]) == (400, True)
        assert not bench.stub.requests
        bench.said = SAID * 2
        for kind in ({}, {"type": "custom"}, {"type": None}):
            assert (await messages(bench, messages=user, tools=[{**CLAUDE_TOOL, **kind}]))[0] == 200
