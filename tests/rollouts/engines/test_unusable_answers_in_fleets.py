"""Engines of a fleet that give unusable answers: they are left, complained about, and no rollout is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from harness import make_run, running
from patience import wait_for
from start_models import TINY_CONFIG
from stub_engine import EOS, StubEngine
from unusable_answers_testing import DAMAGED, PARAMS, text

from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines import unusable
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.routed_pool import RoutedPool
from hpcrl.rollouts.engines.router_client import RouterClient
from hpcrl.rollouts.supervised import Supervised
from hpcrl.runs.events import EventWriter
from hpcrl.runs.role import Complaint, RoleContext
from hpcrl.runs.rundir import RunDir


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
    tmp_path: Path, quick: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(engine_pool, "SHUN_S", 600.0)  # a busy machine needs longer than the usual time for a batch
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


async def test_a_fleet_that_recovers_from_nonsense_continues(tmp_path: Path, quick: None, monkeypatch: Any) -> None:
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
        with pytest.raises(EngineProtocolError, match="the newest is 8"):
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
