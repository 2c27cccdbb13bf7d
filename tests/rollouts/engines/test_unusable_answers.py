"""Answers that no working engine gives: each is an error of that engine, is not trained on, and is made elsewhere."""

from __future__ import annotations

import gzip
import json
import os
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from harness import make_run, running
from patience import wait_for
from start_models import TINY_CONFIG
from stub_engine import EOS, StubEngine, npy, npy_bytes

from hpcrl.answer_frames import MEDIA_TYPE, encode_frame
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines import unusable
from hpcrl.rollouts.engines.client import EngineClient, SamplingParams
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.limits import AnswerLimits
from hpcrl.rollouts.engines.routed_pool import RoutedPool
from hpcrl.rollouts.engines.router_client import RouterClient
from hpcrl.rollouts.engines.update_answer import check_update_answer
from hpcrl.rollouts.supervised import Supervised
from hpcrl.rollouts.telemetry.counters import Counters
from hpcrl.runs.events import EventWriter
from hpcrl.runs.role import Complaint, RoleContext
from hpcrl.runs.rundir import RunDir

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
    "a token that is no number of 32 bits": text(tokens=(3, 2**40)),
    "text that is no UTF-8": text(b'{"choices":[{"finish_reason":"\xff"}]}'),
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


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    """An engine that answers everything with the bytes that it is given, and a client of it."""
    said: dict[str, tuple[str, bytes]] = {}

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        kind, body = said["answer"]
        kind, _, encoding = kind.partition(";")
        headers = {"Content-Type": kind, **({"Content-Encoding": encoding} if encoding else {})}
        return web.Response(body=body, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        client = EngineClient(http, name="engine-0", url=str(server.make_url("")), limits=LIMITS)
        yield said, client


async def ask(client: EngineClient, **changes: Any) -> Any:
    params = msgspec.structs.replace(PARAMS, routed_experts_prompt_start=0, **changes)
    return await client.generate([5, 6, 7], params, cache_salt="1", session_id="s", timeout_s=20.0)


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


# -- the fleet


@pytest.fixture
def quick(monkeypatch: Any) -> Iterator[None]:
    monkeypatch.setattr(engine_pool, "WATCH_S", 0.1)
    monkeypatch.setattr(engine_pool, "_FIRST_BACKOFF_S", 0.01)
    return


def outside_the_vocabulary(token_ids: list[int], seed: int) -> list[int]:
    return [99_999, EOS]


def run_of_known_model(path: Path) -> RunDir:
    run = make_run(path)
    (path / "model" / "config.json").write_text(json.dumps({**TINY_CONFIG, "vocab_size": 103}))
    return run


def complaints(loop: Any) -> dict[str, str]:
    found = Complaint.read_all(loop.run, 1)
    return {f"{complaint.role}-{complaint.replica}": complaint.message for complaint in found}


async def test_an_engine_that_answers_nonsense_costs_no_rollout_and_is_complained_about(
    tmp_path: Path, quick: None
) -> None:
    good, broken = StubEngine(), StubEngine(answer=outside_the_vocabulary)
    async with running(run_of_known_model(tmp_path), good, broken) as loop:
        await loop.batch(1)
        await loop.until(lambda: "engine-1" in complaints(loop))
        counters = loop.parts.counters
        assert counters.unusable_answers >= 4
        assert (counters.dropped_engine, counters.dropped_environment, counters.dropped_group) == (0, 0, 0)
        said = complaints(loop)
        assert list(said) == ["engine-1"]
        assert "token 99999 is outside of the vocabulary" in said["engine-1"]
        # it says that it is healthy, and gets nothing more before it was started anew
        asked = broken.in_flight, len(broken.requests)
        await loop.batch(2)
        assert (broken.in_flight, len(broken.requests)) == asked
        assert all((r.token_ids < 200).all() for r in loop.last_rollouts())


async def test_an_engine_that_cuts_each_answer_short_is_complained_about(tmp_path: Path, quick: None) -> None:
    """It answers all else, so that it looks healthy; what arrived of its answers is kept."""
    good, broken = StubEngine(), StubEngine()
    broken.cut_short = True
    async with running(run_of_known_model(tmp_path), good, broken) as loop:
        await loop.batch(1)
        await loop.until(lambda: "engine-1" in complaints(loop))
        counters = loop.parts.counters
        assert counters.unusable_answers >= 4
        assert (counters.dropped_engine, counters.dropped_environment, counters.dropped_group) == (0, 0, 0)
        assert "ended before the answer did" in complaints(loop)["engine-1"]
        assert list(complaints(loop)) == ["engine-1"]


async def test_a_fleet_that_recovers_from_nonsense_goes_on(tmp_path: Path, quick: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_pool, "SHUN_S", 0.2)
    bad = [40]

    def at_first(token_ids: list[int], seed: int) -> list[int]:
        bad[0] -= 1
        return outside_the_vocabulary(token_ids, seed) if bad[0] > 0 else [EOS]

    async with running(run_of_known_model(tmp_path), StubEngine(answer=at_first)) as loop:
        batch = await loop.batch(1)
        assert batch is not None
        assert loop.parts.counters.unusable_answers > 4


class Front(RouterClient):
    """A router that hands on unusable answers, whose engines can be asked themselves."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        raise EngineProtocolError("router: an answer cannot be read")


class Side(EngineClient):
    """An engine that answers each request with ``error``, or well."""

    def __init__(self, name: str, error: EngineError | None) -> None:
        super().__init__(None, name=name, url=f"http://{name}")  # type: ignore[arg-type]
        self.error = error

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("broken", [(), (1,), (0, 2)])
async def test_behind_a_router_each_engine_is_asked_whose_the_answers_were(
    tmp_path: Path, quick: None, monkeypatch: Any, broken: tuple[int, ...]
) -> None:
    monkeypatch.setattr(unusable, "PATIENCE_S", 0.0)
    told: list[str] = []
    wrong = EngineProtocolError("an answer cannot be read")
    away = EngineError("nobody listens", unreachable=True)
    sides = [Side(f"engine-{i}", wrong if i in broken else None) for i in range(3)] + [Side("engine-3", away)]
    pool = RoutedPool(
        sides,
        router=Front(None, name="router", url="http://router"),  # type: ignore[arg-type]
        events=EventWriter(make_run(tmp_path), attempt=1, writer="test"),
        counters=Counters(),
        request_timeout_s=1.0,
        max_retries=0,
        on_unusable=lambda engine, why: told.append(engine.name),
    )
    for engine in pool.engines:
        engine.serve(1, proved_s=0.0)
        engine.end_exchange()
    pool._routed = set(pool.engines)
    await pool.notify()

    async def salt() -> str:
        return "1"

    for group in range(4):
        with pytest.raises(EngineProtocolError):
            await pool.generate(pool.session(f"group-{group}"), [5], PARAMS, cache_salt=salt)
    assert told == ([f"engine-{i}" for i in broken] or ["router"])
    assert [engine.away for engine in pool.engines] == [i in broken for i in range(4)]


@pytest.mark.parametrize(("status", "asked"), [(503, 21), (502, 3)])
async def test_a_router_without_engines_that_take_requests_costs_no_attempt(
    tmp_path: Path, quick: None, monkeypatch: Any, status: int, asked: int
) -> None:
    """One that lost the engine during the request costs one, as without a router."""
    monkeypatch.setattr(engine_pool, "_LONGEST_BACKOFF_S", 0.001)
    requests = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal requests
        requests += request.method == "POST"
        if request.method == "POST" and requests <= 20:
            return web.Response(status=status, text="No available workers (all circuits open or unhealthy)")
        kind, body = text(routed_experts=None)
        return web.Response(body=body, content_type=kind)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        pool = RoutedPool(
            [Side("engine-0", None)],
            router=RouterClient(session, name="router", url=str(server.make_url("")).rstrip("/")),
            events=EventWriter(make_run(tmp_path), attempt=1, writer="test"),
            counters=Counters(),
            request_timeout_s=5.0,
            max_retries=2,
        )
        pool.engines[0].serve(1, proved_s=0.0)
        pool.engines[0].end_exchange()
        pool._routed = set(pool.engines)
        # nothing watches this pool, which would find that the router is still there
        monkeypatch.setattr(pool, "_suspect", lambda engine: None)
        await pool.notify()

        async def salt() -> str:
            return "1"

        asking = pool.generate(pool.session("group"), [5, 6], PARAMS, cache_salt=salt)
        if status == 503:
            assert (await asking).token_ids.tolist() == [3, 4]
        else:
            with pytest.raises(EngineError, match="answered 502"):
                await asking
        assert requests == asked


def test_who_complains_about_the_router_names_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    supervised = Supervised(RoleContext(run, attempt=1, role="orchestrator", replica=0, rank=0))
    for name in ("router", "decode-2"):
        supervised.restart_engine(engine_pool.Engine(Side(name, None)), "answers nonsense")
    # they are written by a thread
    found = wait_for(lambda: len(read := Complaint.read_all(run, 1)) == 2 and read, 10.0, "complaints")
    assert sorted((complaint.role, complaint.replica) for complaint in found) == [("decode", 2), ("router", 0)]


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


async def test_an_answer_of_a_version_that_was_never_published_is_damaged(serve: Any, quick: None) -> None:
    said, client = serve
    said["answer"] = text(version="9")
    pool = engine_pool.EnginePool([client], counters=Counters(), request_timeout_s=5.0, max_retries=0)
    pool.engines[0].serve(1, proved_s=0.0)
    pool.newest = 9

    async def salt() -> str:
        return "1"

    answer = await pool.generate(pool.session("a"), [5, 6], PARAMS, cache_salt=salt)
    assert answer.versions.tolist() == [9, 9]
    pool.newest = 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unusable, "PATIENCE_S", 0.0)
        with pytest.raises(EngineProtocolError, match="there is none above 8"):
            await pool.generate(pool.session("b"), [5, 6], PARAMS, cache_salt=salt)


async def test_only_nonsense_that_lasts_fails_a_request(serve: Any, quick: None, monkeypatch: Any) -> None:
    said, client = serve
    said["answer"] = DAMAGED["a log-probability of 55, text"]
    now, told, counters = [0.0], [], Counters()
    monkeypatch.setattr(unusable, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(engine_pool, "_LONGEST_BACKOFF_S", 0.001)

    pool = engine_pool.EnginePool(
        [client],
        counters=counters,
        request_timeout_s=5.0,
        max_retries=2,
        on_unusable=lambda engine, why: told.append(why),
    )
    pool.engines[0].serve(1, proved_s=0.0)

    async def salt() -> str:
        now[0] += 10.0
        return "1"

    with pytest.raises(EngineProtocolError, match="log-probability is 55"):
        await pool.generate(pool.session("group-0"), [5, 6], PARAMS, cache_salt=salt)
    # one prompt alone costs no engine
    assert (counters.unusable_answers, told) == (15, [])


def test_unusable_answers_are_counted_by_prompt_within_a_window(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(unusable, "time", SimpleNamespace(monotonic=lambda: now[0]))
    counts, engine = unusable.UnusableAnswers(), engine_pool.Engine(EngineClient(None, name="engine-0", url="http://x"))  # type: ignore[arg-type]
    found = []
    for at, prompt in (
        (0, "a"),
        (1, "a"),
        (2, "a"),
        (3, "a"),
        (100, "b"),
        (500, "c"),
        (650, "d"),
        (651, "e"),
        (652, "f"),
    ):
        now[0] = at
        found.append(counts.note(engine, prompt))
    assert found == [0, 0, 0, 0, 0, 0, 0, 4, 0]


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
