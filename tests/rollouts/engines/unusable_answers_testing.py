"""Answers of engines, damaged ones and good ones, and how a test asks for one."""

from __future__ import annotations

import gzip
import json
from typing import Any

import msgspec
import numpy as np
from stub_engine import EOS, npy, npy_bytes

from hpcrl.network.generate_frames import MEDIA_TYPE, encode_frame
from hpcrl.rollouts.engines.client import EngineClient, SamplingParams
from hpcrl.rollouts.engines.limits import AnswerLimits

JSON = "application/json"
LIMITS = AnswerLimits(vocab_size=50, routes=(2, 3, 8))
PARAMS = SamplingParams(temperature=1.0, max_tokens=2, seed=1, stop_token_ids=[EOS])
ROWS = np.ones((4, 2, 3), np.uint8)
"""Of three tokens of a prompt, and of the first of two that were sampled."""


def header(shape: str, dtype: str = "'|u1'") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(24)


def framed(**changes: Any) -> tuple[str, bytes]:
    choice = {
        "finish_reason": "length",
        "token_ids": np.array(changes.pop("tokens", (3, 4)), "<i4").tobytes(),
        "logprobs": np.array(changes.pop("logprobs", (-1.0, -2.0)), "<f8").tobytes(),
        "weight_versions": [{"version": changes.pop("version", "1"), "start": 0, "end": 2}],
        "routed_experts": npy_bytes(changes.pop("rows", ROWS)),
        **changes,
    }
    return MEDIA_TYPE, bytes(encode_frame({"request_id": "r", "choices": [choice]}))


def text(raw: bytes = b"", **changes: Any) -> tuple[str, bytes]:
    if raw:
        return JSON, raw
    choice = {
        "finish_reason": "length",
        "token_ids": list(changes.pop("tokens", (3, 4))),
        "logprobs": {"content": [{"logprob": p} for p in changes.pop("logprobs", (-1.0, -2.0))]},
        "weight_versions": [{"version": changes.pop("version", "1"), "start": 0, "end": 2}],
        "routed_experts": npy(changes.pop("rows", ROWS)),
        **changes,
    }
    return JSON, json.dumps({"request_id": "r", "choices": [choice]}).encode()


def each(name: str, **changes: Any) -> dict[str, tuple[str, bytes]]:
    """The same damage in both forms of an answer."""
    return {f"{name}, framed": framed(**changes), f"{name}, text": text(**changes)}


DAMAGED = {
    "an error page under our media type": (MEDIA_TYPE, b"<html><body>502 Bad gateway</body></html>"),
    "a frame of 2**40 bytes": (MEDIA_TYPE, (1 << 40).to_bytes(8, "little") + b"x" * 100),
    "a frame of 2**63 bytes": (MEDIA_TYPE, (1 << 63).to_bytes(8, "little") + b"x" * 100),
    "a frame that nests": (
        MEDIA_TYPE,
        bytes(encode_frame(msgspec.Raw(b"\x81\xa5error" + b"\x91" * 200_000 + b"\xc0"))),
    ),
    "two whole answers": (MEDIA_TYPE, framed()[1] * 2),
    "an error that nests": text(b'{"error":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "an unknown field that nests": text(b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "a token of 5,000 digits": text(text(tokens=())[1].replace(b'ids": []', b'ids": [' + b"9" * 5000 + b"]")),
    "a token that is not a number of 32 bits": text(tokens=(3, 2**40)),
    "text that is not UTF-8": text(b'{"choices":[{"finish_reason":"\xff"}]}'),
    "a log-probability that JSON does not have": text(text()[1].replace(b"-2.0", b"NaN")),
    "no choice": text(b'{"choices":[]}'),
    "two choices": text(b'{"choices":[{},{}]}'),
    "a part of a row": framed(routed_experts=npy_bytes(ROWS)[:-1]),
    "rows without end": framed(routed_experts=header("(999999999999, 9, 9)")),
    "rows of a negative number": framed(routed_experts=header("(-1, 2, 3)")),
    "a header that is a program": framed(routed_experts=header("(1,\n  2" + "(" * 90)),
    "a header of objects": framed(routed_experts=header("(4, 2, 3)", "'|O'")),
    "more gzip than an answer": (f"{JSON};gzip", gzip.compress(bytes(1 << 28))),
    **each("a version that no int32 holds", version="99999999999"),
    **each("a version of 5,000 digits", version="9" * 5000),
    **each("a negative token", tokens=(3, -1)),
    **each("a token behind the vocabulary", tokens=(3, 50)),
    **each("more tokens than were asked for", tokens=(3, 4, 5), logprobs=(-1.0, -1.0, -1.0)),
    **each("a log-probability of 55", logprobs=(-1.0, 55.0)),
    **each("a log-probability of -1e300", logprobs=(-1.0, -1e300)),
    **each("a log-probability of minus infinity", logprobs=(-1.0, -9999.0)),
    "a log-probability that is not a number": framed(logprobs=(-1.0, float("nan"))),
    "a log-probability that is infinite": framed(logprobs=(-1.0, float("-inf"))),
    **each("fewer log-probabilities than tokens", logprobs=(-1.0,)),
    **each("no tokens", tokens=(), logprobs=()),
    **each("an end that nobody knows", finish_reason="banana"),
    **each("versions that overlap", weight_versions=[{"version": "1", "start": 0, "end": -1}] * 2),
    **each("rows of another model", rows=np.ones((4, 2, 4), np.uint8)),
    **each("rows of an expert that is none", rows=np.full((4, 2, 3), 8, np.uint8)),
    **each("a row too many", rows=np.ones((5, 2, 3), np.uint8)),
}


async def ask(client: EngineClient, **changes: Any) -> Any:
    params = msgspec.structs.replace(PARAMS, routed_experts_prompt_start=0, **changes)
    return await client.generate([5, 6, 7], params, cache_salt="1", session_id="s", timeout_s=20.0)
