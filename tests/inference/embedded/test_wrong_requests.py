"""Requests of any damage to a real engine: each gets an answer of its own, and the engine serves the next one."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from engine_helpers import Server, embedded_command, start_server

from hpcrl.modeling.decoder import Decoder
from hpcrl.network.generate_frames import MEDIA_TYPE, REQUEST_TYPE, encode_frame

GENERATE, CHAT, TEXT = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "n"),
    *("logprobs", "prompt_logprobs", "routed_experts_prompt_start", "ignore_eos", "stream_interval", "logit_bias"),
    *("allowed_token_ids", "bad_words", "presence_penalty", "detokenize", "include_stop_str_in_output"),
)
OUTER = (
    *("model", "request_id", "stream", "stream_options", "cache_salt", "priority", "return_token_ids", "token_ids"),
    *("kv_transfer_params", "rows_by_reference", "rows_unwanted", "output_mode", "features", "prompt", "messages"),
)


@pytest.fixture(scope="module")
def server(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = embedded_command(
        *("--max-model-len", "64", "--max-num-seqs", "8", "--block-size", "8", "--scheduling-policy", "priority"),
        "--enable-return-routed-experts",
    )
    running = start_server(command, *tiny, tmp_path_factory.mktemp("log") / "server.log")
    yield running
    assert running.stop() == 0


def ask(
    server: Server, path: str, body: bytes, content_type: str, accept: str = "application/json"
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20.0)
    try:
        connection.request("POST", path, body, {"Content-Type": content_type, "Accept": accept})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def good(server: Server) -> list[int]:
    """What it answers to a request that is right, always the same."""
    sampling = {"max_tokens": 4, "temperature": 0.0, "logprobs": 1}
    body = json.dumps({"token_ids": [5, 6, 7], "sampling_params": sampling}).encode()
    status, data = ask(server, GENERATE, body, "application/json")
    assert status == 200, data
    tokens: list[int] = json.loads(data)["choices"][0]["token_ids"]
    return tokens


WRONG = {
    "top_k": 2**70,
    "max_tokens": 2**70,
    "min_tokens": 2**70,
    "seed": 2**64,
    "stream_interval": 2**70,
    "priority": 2**90,
    "logprobs": 2**70,
    "prompt_logprobs": -(2**70),
    "routed_experts_prompt_start": 2**70,
    "stop_token_ids": [2**70],
    "temperature": 1e308,
    "token_ids": [2**40],
}


@pytest.mark.parametrize("name", WRONG)
def test_numbers_without_end_are_refused(server: Server, name: str) -> None:
    before = good(server)
    sampling: dict[str, Any] = {"max_tokens": 4, "logprobs": 1}
    body: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": sampling}
    (body if name in OUTER else sampling)[name] = WRONG[name]
    status, data = ask(server, GENERATE, json.dumps(body).encode(), "application/json")
    assert status == 400, data
    assert json.loads(data)["error"]["code"] == 400
    assert good(server) == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, b'{"token_ids":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        (GENERATE, b'{"token_ids":[5],"sampling_params":{},"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        (GENERATE, b'{"token_ids":[5],"sampling_params":{"seed":' + b"9" * 5000 + b"}}"),
        (GENERATE, b'{"token_ids":[5],"sampling_params":{"top_p":NaN}}'),
        (GENERATE, b'{"token_ids":[5],"sampling_params":{"temperature":1e999}}'),
        (CHAT, b'{"messages":' + b"[" * 100_000),
        (TEXT, b'{"prompt":' + json.dumps([[5]] * 3000).encode() + b',"n":3000}'),
        ("/inference/v1/abort_requests", b'{"request_ids":[[1],{"a":1}]}'),
        ("/inference/v1/abort_requests", b"[" * 100_000),
        ("/abort_requests", b'{"request_ids":7}'),
        ("/pause", b"[" * 100_000),
    ],
)
def test_damaged_bodies_are_refused(server: Server, path: str, body: bytes) -> None:
    before = good(server)
    status, data = ask(server, path, body, "application/json")
    if path == "/pause":  # which reads no body
        assert ask(server, "/resume", b"", "application/json")[0] == 200
    else:
        assert status == 400, data
    assert good(server) == before


def test_one_sequence_of_several_may_not_run_out_of_seeds(server: Server) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "seed": 2**63 - 1, "n": 4}}
    status, data = ask(server, GENERATE, json.dumps(body).encode(), "application/json")
    assert (status, len(json.loads(data)["choices"])) == (200, 4)


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_of_a_frame_that_are_none_are_refused(server: Server, stream: bool) -> None:
    for name in ("temperature", "top_p", "min_p"):
        for value in (float("nan"), float("inf"), -float("inf")):
            sampling = {"max_tokens": 2, name: value}
            body = {"token_ids": np.array([5, 6], "<i4").tobytes(), "sampling_params": sampling, "stream": stream}
            status, data = ask(server, GENERATE, bytes(encode_frame(body)), REQUEST_TYPE, MEDIA_TYPE)
            assert status == 400, (name, value, data)
    good(server)


# -- any damage


def value(rng: random.Random, depth: int = 0) -> Any:
    big = [0, 1, -1, 2, 3, 63, 64, 102, 103, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), 10**400]
    small = [0.0, 0.5, 1.0, 1e-6, 1e-300, 1e308, -0.5, 2.0, None, True, False, "", "x", "\0", "x" * 5000, "1", "length"]
    if depth < 3 and rng.random() < 0.25:
        if rng.random() < 0.5:
            return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3, 40]))]
        return {rng.choice(SAMPLING + OUTER): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    return rng.choice([*big, *small])


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice([GENERATE, GENERATE, GENERATE, CHAT, TEXT])
    sampling: dict[str, Any] = {"max_tokens": 3, "logprobs": 1}
    body: dict[str, Any] = {"token_ids": [rng.randrange(103) for _ in range(rng.choice([1, 5, 60, 70]))]}
    if path == GENERATE:
        body["sampling_params"] = sampling
    else:
        body |= {"max_tokens": 3, "prompt": "ab", "messages": [{"role": "user", "content": "ab"}]}
        sampling = body
    for _ in range(rng.choice([1, 1, 2, 4])):
        sampling[rng.choice(SAMPLING)] = value(rng)
    if rng.random() < 0.4:
        body[rng.choice(OUTER)] = value(rng)
    return path, body


def encoded(rng: random.Random, path: str, body: dict[str, Any]) -> tuple[bytes, str]:
    text = json.dumps(body).encode()
    if path == GENERATE and rng.random() < 0.3:
        try:
            ids = np.array(body["token_ids"], "<i4").tobytes() if rng.random() < 0.8 else b"abc"
            return bytes(encode_frame({**body, "token_ids": ids})), REQUEST_TYPE
        except (OverflowError, ValueError, TypeError):  # what msgpack and arrays do not hold
            pass
    if rng.random() < 0.2:
        data = bytearray(text)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data), "application/json"
    return text, "application/json"


def check_answer(status: int, data: bytes) -> None:
    """An error says what is wrong with the request, and none is the engine's own."""
    assert status in (200, 400, 404), data[:500]
    if status != 200:
        assert msgspec.json.decode(data)["error"]["code"] == status
    assert b'"code":500' not in data, data[:500]


def fuzz(server: Server, rng: random.Random, goes_on: Callable[[], bool]) -> int:
    before, done = good(server), 0
    while goes_on():
        path, body = request(rng)
        data, kind = encoded(rng, path, body)
        accept = MEDIA_TYPE if path == GENERATE and rng.random() < 0.3 else "application/json"
        try:
            check_answer(*ask(server, path, data, kind, accept))
        except Exception as error:
            raise AssertionError(f"{error!r} for {path} {data[:1500]!r}") from error
        done += 1
        if done % 20 == 0:
            assert good(server) == before
    assert good(server) == before
    return done


def test_damaged_requests_are_answered(server: Server) -> None:
    left = iter(range(60))
    assert fuzz(server, random.Random(3), lambda: next(left, None) is not None) == 60


@pytest.mark.campaign
def test_damaged_requests_for_a_while(server: Server) -> None:
    seed = int(os.environ.get("HPCRL_FUZZ_SEED", time.time_ns()))
    end = time.monotonic() + 45.0
    print(f"HPCRL_FUZZ_SEED={seed}: {fuzz(server, random.Random(seed), lambda: time.monotonic() < end)} requests")
