"""Answers in binary: the same as in text, wherever pieces are cut, and from the real embedded engine."""

from __future__ import annotations

import json
import random
import tracemalloc
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from stub_engine import npy_bytes

from hpcrl.network.generate_frames import MEDIA_TYPE, FrameSplitter, encode_frame
from hpcrl.rollouts.engines.answers import (
    AnswerPart,
    AnswerReader,
    EngineError,
    EngineProtocolError,
    OnPart,
    SamplingParams,
)
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
        splitter = FrameSplitter(1 << 20)
        frames = [frame for a, b in pairwise(places) for frame in splitter.feed(stream[a:b])]
        assert [msgspec.msgpack.decode(frame) for frame in frames] == values, places


def test_a_frame_that_has_not_ended_is_none() -> None:
    frame = encode_frame("x" * 100)
    splitter = FrameSplitter(1 << 20)
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
    (frame,) = FrameSplitter(1 << 20).feed(encode_frame({"request_id": "r", "choices": [{**choice, **changes}]}))
    return frame


def reader(
    *, routed: bool = True, max_tokens: int = 8, on_part: OnPart = lambda tokens, scores, rows: None
) -> AnswerReader:
    params = msgspec.structs.replace(PARAMS, max_tokens=max_tokens)
    params = params if routed else msgspec.structs.replace(params, routed_experts_prompt_start=msgspec.UNSET)
    return AnswerReader("engine-0", 1, params, on_part)


def test_a_frame_is_read_without_a_copy_of_its_rows() -> None:
    own, frame = reader(), framed()
    part = own.read(frame)
    own.take(part)
    answer = own.generation(part)
    columns = (answer.token_ids, answer.logprobs, answer.versions)
    assert [column.tolist() for column in columns] == [[5, 2], [-0.5, -0.25], [3, 3]]
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


def test_tokens_of_an_answer_that_comes_in_parts_are_numbers_and_no_objects() -> None:
    """Lists of Python's have 68 bytes a token, and an array a part a hundred more."""
    own, parts = reader(routed=False, max_tokens=20_000), 20_000
    tracemalloc.start()
    for number in range(parts):
        own.take(AnswerPart(np.array([1000 + number], np.int32), np.array([-0.5], np.float32), None))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 30 * parts
    spans = [{"version": "3", "start": 0, "end": 5}, {"version": "4", "start": 5, "end": parts}]
    answer = own.generation(own.read(framed(token_ids=b"", logprobs=b"", weight_versions=spans)))
    assert answer.token_ids.tolist() == list(range(1000, 1000 + parts))
    assert answer.logprobs.tolist() == [-0.5] * parts
    assert answer.versions.tolist() == [3] * 5 + [4] * (parts - 5)


@pytest.mark.parametrize("spans", [[], [(0, 1)], [(1, 2)], [(0, 3)], [(0, 1), (0, 2)], [(0, 2), (2, 1)]])
def test_versions_cover_each_token_once(spans: list[tuple[int, int]]) -> None:
    own = reader(routed=False)
    said = [{"version": "3", "start": start, "end": end} for start, end in spans]
    part = own.read(framed(weight_versions=said))
    own.take(part)
    with pytest.raises(EngineProtocolError, match="do not cover 2 tokens"):
        own.generation(part)


@pytest.mark.parametrize(("scores", "then"), [([], 2), ([-0.5], 2), ([-0.5] * 3, 2), ([-0.5], 3)])
def test_each_token_has_a_log_probability(scores: list[float], then: int) -> None:
    told: list[Any] = []
    own = reader(routed=False, on_part=lambda *part: told.append(part))
    logprobs = np.array(scores, "<f8").tobytes()
    own.take(own.read(framed(logprobs=logprobs, finish_reason=None)))
    assert told == []
    rest = np.full(then, -0.5, "<f8").tobytes()
    last = own.read(framed(logprobs=rest, weight_versions=[{"version": "3", "start": 0, "end": 4}]))
    own.take(last)
    with pytest.raises(EngineProtocolError, match=f"4 tokens with {then + len(scores)} log-probabilities"):
        own.generation(last)


def test_an_error_in_a_frame_ends_the_request() -> None:
    (frame,) = FrameSplitter(1 << 20).feed(encode_frame({"error": {"message": "aborted"}}))
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
        assert answer.token_ids.tolist() == [5, 2]
        engine = EngineClient(session, name="engine-0", url=str(server.make_url("")))
        with pytest.raises(EngineError):
            await engine.generate([1], params, cache_salt="3", session_id="s", timeout_s=10.0)
    assert asked == [False, True]
