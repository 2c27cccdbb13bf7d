"""Answers in binary: the same as in text, wherever pieces are cut, and from the real embedded engine."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from stub_engine import npy_bytes

from hpcrl.answer_frames import MEDIA_TYPE, FrameSplitter, encode_frame
from hpcrl.rollouts.engines.answers import AnswerReader, EngineError, EngineProtocolError, SamplingParams
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.router_client import RouterClient

PARAMS = SamplingParams(temperature=1.0, max_tokens=8, seed=1, stop_token_ids=[2], routed_experts_prompt_start=0)
ROWS = np.random.default_rng(0).integers(0, 256, (2, 3, 4), np.uint8)


def test_frames_are_the_same_wherever_pieces_are_cut() -> None:
    values = ["", "two", "x" * 40, "end"]
    stream = b"".join(encode_frame(value) for value in values)
    rng = random.Random(0)
    cuts = [[*range(len(stream) + 1)], [0, len(stream)]]
    cuts += [sorted({0, len(stream), *(rng.randrange(len(stream)) for _ in range(9))}) for _ in range(300)]
    for places in cuts:
        splitter = FrameSplitter()
        frames = [frame for a, b in pairwise(places) for frame in splitter.feed(stream[a:b])]
        assert [msgspec.msgpack.decode(frame) for frame in frames] == values, places


def test_a_frame_that_has_not_ended_is_none() -> None:
    frame = encode_frame("x" * 100)
    splitter = FrameSplitter()
    assert splitter.feed(frame[:5]) == []
    assert splitter.feed(frame[5:-1]) == []
    (found,) = splitter.feed(frame[-1:] + frame[:3])
    assert msgspec.msgpack.decode(found) == "x" * 100


def framed(**changes: Any) -> memoryview:
    choice = {
        "token_ids": np.array([5, 2], "<i4").tobytes(),
        "logprobs": np.array([-0.5, -0.25], "<f8").tobytes(),
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "routed_experts": npy_bytes(ROWS),
    }
    (frame,) = FrameSplitter().feed(encode_frame({"request_id": "r", "choices": [{**choice, **changes}]}))
    return frame


def reader() -> AnswerReader:
    return AnswerReader("engine-0", 1, PARAMS, lambda tokens, scores, rows: None)


def test_a_frame_is_read_without_a_copy_of_its_rows() -> None:
    own, frame = reader(), framed()
    part = own.read(frame)
    own.take(part)
    answer = own.generation(part)
    assert (answer.token_ids, answer.logprobs, answer.versions) == ([5, 2], [-0.5, -0.25], [3, 3])
    assert (answer.finish_reason, answer.request_id) == ("stop", "r")
    assert answer.experts is not None
    assert (answer.experts == ROWS).all()
    assert np.shares_memory(answer.experts, np.frombuffer(frame, np.uint8))


@pytest.mark.parametrize(
    "changes", [{"token_ids": b"123"}, {"logprobs": b"1"}, {"routed_experts": b"no file"}, {"token_ids": [5, 2]}]
)
def test_a_damaged_frame_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineProtocolError, match="cannot be read"):
        reader().read(framed(**changes))


def test_an_error_in_a_frame_ends_the_request() -> None:
    (frame,) = FrameSplitter().feed(encode_frame({"error": {"message": "aborted"}}))
    own = reader()
    with pytest.raises(EngineError, match="aborted"):
        own.take(own.read(frame))


async def test_a_router_is_asked_for_events() -> None:
    """vllm-router says of every stream that it has events: of an answer in frames it would hand on the bytes alone."""
    choice = {"token_ids": [5, 2], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}
    choice |= {"finish_reason": "stop", "weight_versions": [{"version": "3", "start": 0, "end": 2}]}
    asked = []

    async def generate(request: web.Request) -> web.Response:
        asked.append(MEDIA_TYPE in request.headers["accept"])
        if asked[-1]:
            return web.Response(body=encode_frame({"choices": []}), content_type="text/event-stream")
        event = json.dumps({"request_id": "r", "choices": [choice]})
        return web.Response(text=f"data: {event}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=1, stop_token_ids=[2], stream_interval=4)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        router = RouterClient(session, name="router", url=str(server.make_url("")))
        answer = await router.generate([1], params, cache_salt="3", session_id="s", timeout_s=10.0)
        assert answer.token_ids == [5, 2]
        engine = EngineClient(session, name="engine-0", url=str(server.make_url("")))
        with pytest.raises(EngineError):
            await engine.generate([1], params, cache_salt="3", session_id="s", timeout_s=10.0)
    assert asked == [False, True]
