"""Retries, clients that hang up, secrets, limits and failures of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from gateway_testing import TOOLS, GatewayBench, gateway_bench, sequences
from harness import make_recipe
from patience import patience
from stub_engine import StubEngine

from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments import PolicyEndpoint
from hpcrl.rollouts.gateway import messages, server
from hpcrl.rollouts.gateway.recorder import RolloutRecorder
from hpcrl.rollouts.parts import gateway_host
from hpcrl.rollouts.sampling.branches import TooManyBranchesError
from hpcrl.rollouts.sampling.turn_sampler import TurnSampler
from hpcrl.runs.role import Endpoints

USER: Any = {"role": "user", "content": "Hello."}
BODY: Any = {"model": "policy", "messages": [USER]}


async def say(bench: GatewayBench, *contents: str, **more: Any) -> str:
    """The text of the next turn of a conversation."""
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    answer = await bench.client().chat.completions.create(model="policy", messages=messages, **more)
    return str(answer.choices[0].message.content)


async def post(endpoint: PolicyEndpoint, body: Any = BODY, *, path: str = "/chat/completions", **headers: str) -> Any:
    """Status and JSON of a request without an SDK."""
    given = {"Authorization": f"Bearer {endpoint.key}"} | {k.replace("_", "-"): v for k, v in headers.items()}
    kind = "data" if isinstance(body, bytes) else "json"
    url = endpoint.url + path
    async with aiohttp.ClientSession() as http, http.post(url, headers=given, **{kind: body}) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if answer.content_type == "application/json" else text


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {arguments}}}'}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def slow(stub: StubEngine) -> None:
    stub.request_s = 3600.0


async def test_a_marked_repetition_joins_the_request_that_runs(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path, change=lambda stub: stub.awake.clear()) as bench:
        bench.said = ["One.<|im_end|>", "Two.<|im_end|>"]
        first = asyncio.create_task(post(bench.endpoint))
        await until(lambda: bench.turns.branches and len(bench.recorder.calls) == 1)
        again = asyncio.create_task(post(bench.endpoint, x_stainless_retry_count="1"))
        await until(lambda: bench.recorder.calls.joined == 1)
        bench.stub.awake.set()
        (_, one), (_, two) = await asyncio.gather(first, again)
        assert one == two
        assert len(bench.stub.requests) == bench.counters.gateway_requests == bench.counters.gateway_joins == 1
        # its answer may have been lost
        assert (await post(bench.endpoint, x_stainless_retry_count="2"))[1] == one
        # what is not marked is a new sample, and a mark means that one from now on
        _, other = await post(bench.endpoint)
        assert (other["choices"][0]["message"]["content"], len(bench.stub.requests)) == ("Two.", 2)
        assert (await post(bench.endpoint, x_stainless_retry_count="1"))[1] == other


async def test_a_mark_means_nothing_once_the_program_has_gone_on(tmp_path: Path) -> None:
    """A shortened history may be sent again: the answer of before would be a turn that is long over."""
    async with gateway_bench(tmp_path) as bench:
        bench.said = [f"{i}.<|im_end|>" for i in range(3)]
        assert await say(bench, "Hello.") == "0."
        assert await say(bench, "Hello.", "0.", "And?") == "1."
        answer = await post(bench.endpoint, x_stainless_retry_count="1")
        assert answer[1]["choices"][0]["message"]["content"] == "2."


async def test_who_hangs_up_aborts_at_the_engine(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path, change=slow) as bench:
        bench.said = ["One.<|im_end|>", "Two.<|im_end|>", "Three.<|im_end|>"]
        for stream in (False, True):
            asked = asyncio.create_task(post(bench.endpoint, {**BODY, "stream": stream}))
            await until(lambda: bench.stub.in_flight == 1)
            asked.cancel()
            await until(lambda: bench.stub.in_flight == 0)
        assert (bench.stub.aborted, bench.counters.gateway_aborts, len(bench.recorder.calls)) == (2, 2, 0)
        # nothing of them is left: the next one is the first sequence
        bench.stub.request_s = 0.0
        assert await say(bench, "Hello.") == "Three."
        ((ids, _),) = sequences(await bench.rollout())
        assert bench.text(ids).endswith("Three.<|im_end|>")
        assert bench.text(ids).count("Hello.") == 1


async def test_a_turn_whose_client_hung_up_while_it_was_parsed_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long turns are parsed in a thread, and the client hangs up meanwhile."""
    monkeypatch.setattr("hpcrl.rollouts.engines.rows.LARGE_BYTES", 1)
    parse, begun, going_on = TurnSampler.parse, threading.Event(), threading.Event()

    def slowly(self: TurnSampler, sampled: Any, tools: Any) -> Any:
        begun.set()
        assert going_on.wait(60 * patience())
        return parse(self, sampled, tools)

    monkeypatch.setattr(TurnSampler, "parse", slowly)
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["Lost.<|im_end|>", "One.<|im_end|>", "Two.<|im_end|>"]
        try:
            asked = asyncio.create_task(post(bench.endpoint))
            await until(begun.is_set)
            asked.cancel()
            await until(lambda: bench.counters.gateway_aborts == 1)
        finally:
            going_on.set()
        assert bench.recorder.failure is None
        assert await say(bench, "Hello.") == "One."
        assert await say(bench, "Hello.", "One.", "And?") == "Two."
        made = await bench.rollout()
        ((ids, sampled),) = sequences(made)
        assert "Lost" not in bench.text(ids)
        trained = bench.text([token for token, own in zip(ids, sampled, strict=True) if own])
        assert (trained, len(made.turns)) == ("One.<|im_end|>Two.<|im_end|>", 2)


async def test_a_joined_request_goes_on_when_the_first_client_hangs_up(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path, change=lambda stub: stub.awake.clear()) as bench:
        bench.said = ["One.<|im_end|>"]
        first = asyncio.create_task(post(bench.endpoint))
        await until(lambda: len(bench.recorder.calls) == 1)
        again = asyncio.create_task(post(bench.endpoint, x_stainless_retry_count="1"))
        await until(lambda: bench.recorder.calls.joined == 1)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        bench.stub.awake.set()
        assert (await again)[1]["choices"][0]["message"]["content"] == "One."
        assert bench.counters.gateway_aborts == 0


async def test_requests_at_once_are_sequences_of_their_own(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["Root.<|im_end|>", *(f"{i}.<|im_end|>" for i in range(4))]
        await say(bench, "Hello.")
        bench.stub.awake.clear()
        asked = [asyncio.create_task(say(bench, "Hello.", "Root.", "And?")) for _ in range(4)]
        await until(lambda: len(bench.recorder.calls) == 4)
        bench.stub.awake.set()
        assert sorted(await asyncio.gather(*asked)) == ["0.", "1.", "2.", "3."]
        assert len({request["sampling_params"]["seed"] for request in bench.stub.requests}) == 5
        rollout = await bench.rollout()
        assert len(rollout.lengths) == 4
        # the first turn is trained once
        assert bench.text(rollout.token_ids[rollout.sampled.astype(bool)]).count("Root.") == 1


async def test_a_secret_holds_for_its_rollout_while_that_runs(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["One.<|im_end|>"]
        other = "http://" + bench.endpoint.url.split("/")[2] + "/r/0123456789abcdef/v1"
        refused = []
        for url, key in ((bench.endpoint.url, "wrong"), (bench.endpoint.url, ""), (other, bench.endpoint.key)):
            found = PolicyEndpoint(url=url, key=key)
            refused.append(await post(found))
        assert {status for status, _ in refused} == {401}
        assert len({str(answer) for _, answer in refused}) == 1
        with pytest.raises(openai.AuthenticationError):
            await bench.client(api_key="wrong").chat.completions.create(**BODY)
        assert not bench.stub.requests
        assert (await post(bench.endpoint, Authorization="", x_api_key=bench.endpoint.key))[0] == 200
    assert bench.endpoint.key not in repr(bench.endpoint)


async def test_it_listens_at_one_address(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path, host="127.0.0.2") as bench:
        bench.said = ["One.<|im_end|>"]
        assert bench.endpoint.url.startswith("http://127.0.0.2:")
        assert (await post(bench.endpoint))[0] == 200
        elsewhere = PolicyEndpoint(url=bench.endpoint.url.replace("127.0.0.2", "127.0.0.1"), key=bench.endpoint.key)
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(elsewhere)


@pytest.mark.parametrize(("reach", "host"), [("node", "127.0.0.1"), ("run", "10.3.0.7")])
def test_other_nodes_reach_it_where_the_recipe_says_so(reach: str, host: str) -> None:
    recipe = make_recipe(Path(), orchestrator={"gateway": reach})
    assert gateway_host(recipe, Endpoints(urls={"orchestrator": ["http://10.3.0.7:4000"]})) == host


async def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BODY_S", 0.2)
    async with gateway_bench(tmp_path) as bench:
        host, port = bench.endpoint.url.split("/")[2].split(":")
        path = bench.endpoint.url.partition(f":{port}")[2]
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bench.endpoint.key}\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\nabc".encode())
        async with asyncio.timeout(30 * patience()):
            assert b" 408 " in await reader.readline()
        writer.close()
        assert not bench.stub.requests


async def test_an_ended_rollout_is_refused_and_what_ran_is_aborted(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path, change=slow) as bench:
        gateway = bench.turns.sampler.gateway
        async with gateway.serve(bench.turns) as (endpoint, _):  # type: ignore[union-attr]
            asked = asyncio.create_task(
                bench.client(base_url=endpoint.url, api_key=endpoint.key).chat.completions.create(**BODY)
            )
            await until(lambda: bench.stub.in_flight == 1)
        await until(lambda: bench.stub.in_flight == 0)
        with pytest.raises(openai.APIError):
            await asked
        with pytest.raises(openai.AuthenticationError):
            await bench.client(base_url=endpoint.url, api_key=endpoint.key).chat.completions.create(**BODY)


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_a_body_that_comes_when_its_rollout_has_ended_asks_no_engine(tmp_path: Path, more: Any) -> None:
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["Late.<|im_end|>"]
        gateway, data = bench.turns.sampler.gateway, json.dumps({**BODY, **more}).encode()
        assert gateway is not None
        async with gateway.serve(bench.turns) as (endpoint, recorder):
            url = urlsplit(endpoint.url)
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.key}\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[:5])
            await until(lambda: recorder._requests == 1)
        writer.write(data[5:])
        async with asyncio.timeout(30 * patience()):
            assert b" 404 " in await reader.readline()
        writer.close()
        assert not bench.stub.requests
        assert not bench.turns.branches.turns


async def test_an_ended_rollout_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """Its tokens and messages are gone when it has ended, and not when the collector finds a cycle."""
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["One.<|im_end|>"]
        sampler = bench.turns.sampler
        gc.disable()
        try:
            turns = TurnSampler(sampler, sampler.pool.session("group-1"), seed=1)
            async with sampler.gateway.serve(turns) as (endpoint, recorder):
                assert (await post(endpoint))[0] == 200
            freed = weakref.ref(recorder)
            del recorder, turns
            await until(lambda: freed() is None)
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "truncated"),
        (b"\xff", 400, "malformed"),
        (b'{"messages": [{"content": ' + b"[" * 100_000, 400, "damaged"),
        ({"messages": []}, 400, "must not be empty"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "roles are"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "not text"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, 400, "must be a list"),
        ({"messages": [USER, calling("[" * 600 + "]" * 600)]}, 400, "nested deeper"),
        ({"messages": [USER], "tools": [{}]}, 400, "tool 0"),
        ({"messages": [USER], "n": 2}, 400, "n must be 1"),
        ({"messages": [USER], "temperature": "hot"}, 400, "Expected"),
    ],
)
async def test_what_is_no_request_is_refused(body: Any, status: int, said: str, tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        found, answer = await post(bench.endpoint, body)
        assert (found, said in answer["error"]["message"]) == (status, True), answer
        assert not bench.stub.requests


async def test_requests_that_fail_are_logged_at_a_bounded_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that a model wrote may repeat one that ends in a defect of ours for as long as it runs."""

    async def fail(self: RolloutRecorder, request: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(RolloutRecorder, "chat", fail)
    async with gateway_bench(tmp_path) as bench:
        for number in range(60):
            assert (await post(bench.endpoint, {**BODY, "seed": number}))[0] == 500
    assert len([record for record in caplog.records if record.name == server.__name__]) < 60


@pytest.mark.parametrize("token_ids", [[], [-1], [1 << 20], [1 << 70]])
async def test_token_ids_that_are_none_are_refused(token_ids: list[int], tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        status, answer = await post(bench.endpoint, {"token_ids": token_ids}, path="/inference/v1/generate")
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_bodies_and_requests_at_once_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_BODY", 4096)
    async with gateway_bench(tmp_path, change=slow, max_branches=100) as bench:
        status, answer = await post(bench.endpoint, {**BODY, "messages": [{"role": "user", "content": "x" * 5000}]})
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        asked = [asyncio.create_task(post(bench.endpoint)) for _ in range(64)]
        await until(lambda: len(bench.recorder.calls) == 64)
        status, answer = await post(bench.endpoint)
        assert (status, answer["error"]["code"]) == (429, "rate_limit")
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_bodies_that_arrive_count_as_requests(tmp_path: Path) -> None:
    """A program that a model wrote may send many large bodies at once; all of them take memory of the orchestrator."""
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["One.<|im_end|>"]
        url = urlsplit(bench.endpoint.url)
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bench.endpoint.key}\r\n"
        writers = []
        for _ in range(64):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(f"{head}Content-Length: 100\r\n\r\n".encode())
            await writer.drain()
            writers.append((reader, writer))
        async with asyncio.timeout(60):
            while (found := await post(bench.endpoint))[0] != 429:
                bench.said.append("One.<|im_end|>")
                await asyncio.sleep(0.01)
        assert found[1]["error"]["code"] == "rate_limit"
        for _, writer in writers:
            writer.close()
        async with asyncio.timeout(60):
            while (await post(bench.endpoint))[0] != 200:
                bench.said.append("One.<|im_end|>")
                await asyncio.sleep(0.01)


async def test_messages_of_many_requests_are_not_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_MAX_KNOWN_BYTES", 10_000)
    async with gateway_bench(tmp_path, max_model_len=60) as bench:
        for number in range(20):
            status, _ = await post(
                bench.endpoint, {**BODY, "messages": [{"role": "user", "content": f"{number:5000}"}]}
            )
            assert status == 400
        assert len(bench.recorder._reader._known) <= 3
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["One.<|im_end|>", "Two.<|im_end|>"]
        asked = "x" * 2000
        monkeypatch.setattr(messages, "_MAX_KNOWN_BYTES", 100)
        assert await say(bench, asked) == "One."
        assert await say(bench, asked, "One.", "y") == "Two."
        assert len(sequences(await bench.rollout())) == 1


async def test_a_full_context_is_said_in_the_words_that_programs_know(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path, max_model_len=60) as bench:
        bench.said = ["One.<|im_end|>"]
        assert await say(bench, "Hello.") == "One."
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 60 tokens") as error:
                await say(bench, "Hello.", "One.", "x" * 300, stream=stream)
            assert error.value.code == "context_length_exceeded"
        assert bench.recorder.truncated
        # that is no failure: what there is counts, and the program may shorten its history
        assert bench.recorder.failure is None
        ((ids, _),) = sequences(await bench.rollout())
        assert bench.text(ids).endswith("One.<|im_end|>")


async def test_an_engine_that_fails_fails_the_rollout_and_is_not_asked_again(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["One.<|im_end|>"]
        bench.stub.fail = 1
        # the pool has tried again already: an SDK does not
        with pytest.raises(openai.InternalServerError):
            await bench.client(max_retries=3).chat.completions.create(**BODY)
        assert isinstance(bench.recorder.failure, EngineError)
        with pytest.raises(openai.BadRequestError, match="the rollout has failed"):
            await bench.client(max_retries=3).chat.completions.create(**BODY)
        assert bench.stub.started == 1


async def test_too_many_branches_fail_the_rollout(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path, max_branches=2) as bench:
        bench.said = [f"{i}.<|im_end|>" for i in range(3)]
        await say(bench, "a")
        await say(bench, "b")
        with pytest.raises(openai.BadRequestError, match="the rollout has failed: TooManyBranchesError"):
            await say(bench, "c")
        assert isinstance(bench.recorder.failure, TooManyBranchesError)


async def test_a_call_without_its_result_is_gone_on_from(tmp_path: Path) -> None:
    """Programs leave results out, and say something else."""
    async with gateway_bench(tmp_path) as bench:
        bench.said = ['<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call><|im_end|>', "Fine.<|im_end|>"]
        answer = await bench.client().chat.completions.create(**BODY, tools=TOOLS)
        message = answer.choices[0].message
        # a tool that is not there is for the program to refuse
        assert message.tool_calls[0].function.name == "rm"
        assert bench.recorder.malformed_calls == 1
        history = [USER, {"role": "assistant", "content": None, "tool_calls": [message.tool_calls[0].model_dump()]}]
        await bench.client().chat.completions.create(
            model="policy", messages=[*history, {"role": "user", "content": "There is no rm."}], tools=TOOLS
        )
        assert bench.prompts()[1][: len(bench.prompts()[0])] == bench.prompts()[0]
        assert len(sequences(await bench.rollout())) == 1
