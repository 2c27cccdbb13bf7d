"""Requests in binary, as the orchestrator sends them to an embedded engine that has answered in binary."""

from __future__ import annotations

import json
import struct
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from contract import EMBEDDED, GENERATE, label, prompt_of
from engine_helpers import SERVED_NAME, Server

from hpcrl.network.generate_frames import MEDIA_TYPE, REQUEST_TYPE, encode_frame
from hpcrl.rollouts.core.prompts import EncodedTokens, PromptTokens
from hpcrl.rollouts.engines.client import EngineClient, SamplingParams
from hpcrl.rollouts.engines.router_client import RouterClient

pytestmark = pytest.mark.skipif(not EMBEDDED, reason="vLLM takes JSON alone")

PROMPT = prompt_of(61, seed=81)
SAMPLING = {"max_tokens": 9, "seed": 5, "temperature": 1.0, "logprobs": 1, "routed_experts_prompt_start": 12}
IDS = np.array(PROMPT, "<i4").tobytes()


@pytest.fixture
def server(contract_server: Server) -> Server:
    return contract_server


def ask(server: Server, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Status and bytes of the answer to a framed request."""
    with server.request("POST", GENERATE, body, {"content-type": REQUEST_TYPE, **headers}) as answer:
        return answer.status, answer.read()


def frame(**changes: Any) -> bytes:
    return bytes(encode_frame({"token_ids": IDS, "sampling_params": SAMPLING, **changes}))


def test_answers_are_equal_in_every_bit(server: Server) -> None:
    """To requests in both forms, in text and in frames."""
    server.generate(PROMPT, **SAMPLING)  # both find the prompt in the cache, and round alike
    text = {"token_ids": PROMPT, "sampling_params": SAMPLING, "return_token_ids": True}
    for accept in (MEDIA_TYPE, "application/json"):
        with server.request("POST", GENERATE, text, {"accept": accept}) as answer:
            wanted = answer.read()
        status, found = ask(server, frame(return_token_ids=True), accept=accept)
        assert status == 200
        one, other = (_without_names(data, accept) for data in (wanted, found))
        assert one["prompt_token_ids"] == PROMPT
        assert one == other


@pytest.mark.parametrize("accept", [MEDIA_TYPE, "application/json"])
@pytest.mark.parametrize("stream", [False, True])
def test_unwanted_rows_are_not_sent(server: Server, accept: str, stream: bool) -> None:
    """In frames, in text, and where they would stay at the engine."""
    _, small = ask(server, frame(rows_by_reference=True, rows_unwanted=True, stream=stream), accept=accept)
    _, large = ask(server, frame(rows_by_reference=True, stream=stream), accept=accept)
    nothing = b"\xaerouted_experts\xc0" if accept == MEDIA_TYPE else b'"routed_experts":null'
    assert small.count(nothing) == small.count(b"routed_experts") > 0
    assert large.count(nothing) < large.count(b"routed_experts")


def _without_names(answer: bytes, accept: str) -> Any:
    read = msgspec.msgpack.decode(answer[8:]) if accept == MEDIA_TYPE else json.loads(answer)
    return {name: value for name, value in read.items() if name not in ("request_id", "created")}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "in 8 bytes, and here are 0"),
        (b"123", "in 8 bytes, and here are 3"),
        (frame()[:-1], "has"),
        (frame() + b"x", "has"),
        (struct.pack("<Q", 1 << 63), "a frame of 9223372036854775808 bytes has 0"),
        (struct.pack("<Q", 4) + b"\xc1\xc1\xc1\xc1", "cannot be read"),
        (frame(token_ids=IDS[:-1]), "buffer size must be a multiple"),
        (frame(token_ids=PROMPT), "token_ids"),
        (frame(token_ids=None), "token_ids"),
        (frame(token_ids=b""), "prompt"),
        (frame(token_ids=np.array([7, -1], "<i4").tobytes()), "-1"),
        (frame(token_ids=np.array([7, 1 << 20], "<i4").tobytes()), "1048576"),
        (frame(sampling_params={"max_tokens": "nine"}), "sampling_params.max_tokens"),
        (frame(sampling_params={**SAMPLING, "presence_penalty": 1.0}), "presence_penalty is not supported"),
        (frame(cache_salt="a@b"), "cache_salt"),
        (frame(model="another"), "another"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_message(server: Server, body: bytes, said: str) -> None:
    status, answer = ask(server, body)
    error = json.loads(answer)["error"]
    assert status == (404 if "another" in said else 400)
    assert said in error["message"]
    assert server.get("/health")[0] == 200


def test_other_calls_take_json_alone(server: Server) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        with server.request("POST", path, frame(), {"content-type": REQUEST_TYPE}) as answer:
            assert answer.status == 400
            assert "application/json" in json.loads(answer.read())["error"]["message"]
    assert server.call(GENERATE, {"token_ids": PROMPT, "sampling_params": SAMPLING, "model": SERVED_NAME})[0] == 200


@pytest.mark.parametrize("kind", [EngineClient, RouterClient])
async def test_the_orchestrator_sends_frames_to_an_engine_that_answers_in_frames(
    server: Server, kind: type[EngineClient]
) -> None:
    """From the second request on; a router, that chooses by the prompt, gets JSON each time."""
    sent = []

    async def note(_: object, __: object, params: aiohttp.TraceRequestEndParams) -> None:
        sent.append(params.headers["content-type"])

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(note)
    params = SamplingParams(**SAMPLING, stop_token_ids=[])
    before = server.get("/weight_info")[1]["weight_version"]
    label(server, "7")
    ready = EncodedTokens(np.array(PROMPT, np.int32), lambda: b",".join(b"%d" % token for token in PROMPT))
    try:
        async with aiohttp.ClientSession(trace_configs=[trace]) as session:
            told = {"hands_on_content_types": True} if kind is RouterClient else {}
            client = kind(session, name="it", url=server.url, **told)
            prompts: list[PromptTokens] = [PROMPT, PROMPT, ready, PROMPT]
            answers = [
                await client.generate(prompt, params, cache_salt="9", session_id="s", timeout_s=60.0)
                for prompt in prompts
            ]
    finally:
        label(server, before)
    later = "application/json" if kind is RouterClient else REQUEST_TYPE
    assert sent == ["application/json", later, later, later]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert len({tuple(answer.logprobs) for answer in answers[1:]}) == 1
