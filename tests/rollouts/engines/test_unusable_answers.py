"""Answers that no working engine gives: each is an error of that engine, is not trained on, and is made elsewhere."""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from unusable_answers_testing import DAMAGED, JSON, ROWS, ask, framed, text

from hpcrl.network.generate_frames import MEDIA_TYPE
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.update_answer import check_update_answer


@pytest.mark.parametrize("kind", [framed, text])
async def test_an_answer_of_a_working_engine_is_taken(serve: Any, kind: Any) -> None:
    said, client = serve
    said["answer"] = kind()
    found = await ask(client)
    assert (found.token_ids.tolist(), found.logprobs.tolist(), found.versions.tolist()) == (
        [3, 4],
        [-1.0, -2.0],
        [1, 1],
    )
    assert (found.experts == ROWS).all()


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("interval", [msgspec.UNSET, 1], ids=["whole", "parts"])
async def test_a_damaged_answer_is_an_error_of_the_engine(serve: Any, case: str, interval: Any) -> None:
    said, client = serve
    kind, body = DAMAGED[case]
    if interval == 1 and kind != MEDIA_TYPE:
        kind, body = kind.replace(JSON, "text/event-stream"), b"data: " + body + b"\n\n"
    said["answer"] = kind, body
    tracemalloc.start()
    with pytest.raises(EngineError) as raised:
        await ask(client, stream_interval=interval)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # a stream that ends early is one of an engine that went away; all else counts against the engine
    assert isinstance(raised.value, EngineProtocolError) or raised.value.unreachable
    assert raised.value.retryable
    assert len(str(raised.value)) < 3000
    assert peak < 64 << 20


@pytest.mark.parametrize(
    "answer",
    [
        b"[]",
        b'{"prompt_logprobs":[null,{"6":{"logprob":-9999.0}},{"7":{"logprob":-1.0}}]}',
        b'{"prompt_logprobs":[null,{"6":{"logprob":5.0}},{"7":{"logprob":-1.0}}]}',
        b'{"prompt_logprobs":[null,{"6":{"logprob":-1.0}},null]}',
        b'{"prompt_logprobs":[null,{"6":{"logprob":-1.0}}]}',
        b'{"prompt_logprobs":[{"5":{"logprob":-1.0}},{"6":{"logprob":-1.0}},{"7":{"logprob":-1.0}}]}',
        b'{"prompt_logprobs":[null,{"6":{"logprob":-1.0}},{"8":{"logprob":-1.0}}]}',
        b'{"prompt_logprobs":' + b"[" * 100_000,
    ],
)
async def test_damaged_log_probabilities_of_a_prompt_are_refused(serve: Any, answer: bytes) -> None:
    said, client = serve
    said["answer"] = JSON, answer
    with pytest.raises(EngineProtocolError):
        await client.prompt_logprobs([5, 6, 7], cache_salt="c", timeout_s=10.0)


@pytest.mark.parametrize("answer", [b"[" * 100_000, b"\xff", b'{"weight_version":' + b"[" * 9, b"7", b""])
async def test_a_damaged_answer_to_a_question_says_nothing(serve: Any, answer: bytes) -> None:
    said, client = serve
    said["answer"] = JSON, answer
    assert await client.weight_version(timeout_s=5.0) is None
    assert await client.is_paused(timeout_s=5.0) is False
    assert await client.control("/resume", timeout_s=5.0) == {}
    assert await client.healthy(timeout_s=5.0)


@pytest.mark.parametrize(
    "answer",
    [
        {"version": "7"},
        {"version": -1},
        {"version": 8},
        {"version": 10**400},
        {"version": None},
        {"skipped": 3},
        {"skipped": [{"version": 6}]},
        {"skipped": [{"version": "6", "reason": "torn"}]},
        {"skipped": [{"version": 6, "reason": "x" * 100_000}]},
    ],
)
def test_a_damaged_answer_to_a_weight_update_is_refused(answer: dict[str, Any]) -> None:
    good = {"version": 6, "skipped": [{"version": 7, "reason": "torn"}], "message": "Weights updated"}
    assert check_update_answer("engine-0", good, asked=7) == good
    assert check_update_answer("engine-0", {}, asked=7) == {}
    with pytest.raises(EngineProtocolError, match="engine-0"):
        check_update_answer("engine-0", answer, asked=7)


# -- any damage


def damaged(rng: random.Random) -> tuple[str, bytes]:
    """An answer with other values, flipped bits, a part of it, or bytes by chance."""
    numbers = [0, 1, 2, -1, 49, 50, 2**31, 2**63, 2**64 - 1]
    floats = [0.0, -1.0, 1e-9, 5.0, -9999.0, -1e300, float("nan"), float("-inf"), -0.0]
    changes: dict[str, Any] = {}
    if rng.random() < 0.4:
        changes["tokens"] = [rng.choice(numbers) & 0x7FFFFFFF for _ in range(rng.choice([0, 1, 2, 2, 3]))]
    if rng.random() < 0.4:
        changes["logprobs"] = [rng.choice(floats) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
    if rng.random() < 0.3:
        changes["version"] = rng.choice(["0", "1", "-1", "x", "", "9" * 5000, "2147483648", "\u0663", " 1"])
    if rng.random() < 0.3:
        shape = rng.choice([(4, 2, 3), (3, 2, 3), (5, 2, 3), (4, 3, 2), (0, 2, 3), (4, 6), (4, 2, 3, 1)])
        changes["rows"] = np.full(shape, rng.choice([0, 7, 8, 255]), rng.choice(["u1", "<u2", "<i8", "<f4"]))
    if rng.random() < 0.2:
        spans = [{"version": "1", "start": rng.choice(numbers), "end": rng.choice(numbers[:-1])} for _ in range(2)]
        changes["weight_versions"] = spans[: rng.randrange(3)]
    if rng.random() < 0.2:
        changes["finish_reason"] = rng.choice([None, "stop", "abort", "", "x" * 9000])
    kind, body = rng.choice([framed, text])(**changes)
    data = bytearray(body)
    for _ in range(rng.choice([0, 0, 1, 3])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    if rng.random() < 0.05:
        data = bytearray(rng.randbytes(rng.randrange(200)))
    return kind, bytes(data)


def check_taken(found: Any) -> None:
    """What is trained on: as many of each as there are tokens, all of them possible."""
    count = len(found.token_ids)
    assert 1 <= count <= 2
    assert [len(found.logprobs), len(found.versions)] == [count, count]
    assert ((found.token_ids >= 0) & (found.token_ids < 50)).all()
    assert (np.isfinite(found.logprobs) & (found.logprobs > -9999) & (found.logprobs < 0.01)).all()
    assert (found.versions >= 0).all()
    assert found.finish_reason in ("stop", "length")
    assert found.experts is None or found.experts.shape == (2 + count, 2, 3)
    assert found.experts is None or (found.experts.min() >= 0 and found.experts.max() < 8)


async def fuzz(serve: Any, rng: random.Random, goes_on: Callable[[], bool]) -> int:
    said, client = serve
    done = 0
    while goes_on():
        kind, body = damaged(rng)
        interval = rng.choice([msgspec.UNSET, 1])
        if interval == 1 and kind == JSON:
            kind, body = "text/event-stream", b"data: " + body + b"\n\n"
        said["answer"] = kind, body
        try:
            check_taken(await ask(client, stream_interval=interval))
        except EngineError:
            pass
        except BaseException as error:
            raise AssertionError(f"{error!r} for {kind} {body[:1500]!r}") from error
        done += 1
    return done


async def test_damaged_answers_are_refused_or_of_a_working_engine(serve: Any) -> None:
    left = iter(range(300))
    assert await fuzz(serve, random.Random(11), lambda: next(left, None) is not None) == 300


@pytest.mark.campaign
async def test_damaged_answers_for_a_while(serve: Any) -> None:
    seed = int(os.environ.get("HPCRL_FUZZ_SEED", time.time_ns()))
    end = time.monotonic() + 45.0
    print(f"HPCRL_FUZZ_SEED={seed}: {await fuzz(serve, random.Random(seed), lambda: time.monotonic() < end)} answers")
