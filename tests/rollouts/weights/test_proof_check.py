"""The orchestrator asks engines for a proof, and counts none as serving that computes with something else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hpcrl.rollouts.engines.client import EngineClient, EngineError
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.weights import proof as proving
from hpcrl.rollouts.weights.proof import ProofCheck, WrongWeightsError
from hpcrl.weights import HandoffStore

RIGHT = {"state": "compared", "compared": ["a", "b"], "decisive": True}
WRONG = {"state": "compared", "compared": ["a", "b"], "wrong": ["b"], "decisive": True}
READING = {"state": "reading"}


class Events:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, **data: Any) -> None:
        self.said.append((kind, data))


class Server(EngineClient):
    """Answers in turn with what a test says, and with the last of it for ever."""

    def __init__(self, session: aiohttp.ClientSession, answers: list[Any]) -> None:
        super().__init__(session, name="engine-0", url="http://node:8000")
        self.answers = answers
        self.asked: list[list[str]] = []

    async def control(self, path: str, value: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        assert path == "/collective_rpc"
        assert value is not None
        assert value["method"] == "prove_weights"
        self.asked.append(value["args"])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {"results": answer} if isinstance(answer, list) else answer


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def events() -> Events:
    return Events()


def checker(root: Path, events: Events, limit_s: float = 20.0) -> ProofCheck:
    return ProofCheck(HandoffStore(root), events, call_s=5.0, limit_s=limit_s)  # type: ignore[arg-type]


def engine_of(session: aiohttp.ClientSession, *answers: Any) -> tuple[Engine, Server]:
    server = Server(session, list(answers))
    return Engine(server), server


async def test_all_processes_must_show_it(session: aiohttp.ClientSession, tmp_path: Path, events: Events) -> None:
    engine, server = engine_of(session, [READING, RIGHT], [RIGHT, READING], [RIGHT, RIGHT])
    assert await checker(tmp_path, events).check(engine, 7, 6)
    assert [args[:2] for args in server.asked] == [[str(tmp_path / "v000007"), str(tmp_path / "v000006")]] * 3
    assert len({args[2] for args in server.asked}) == 1
    assert events.said == []


async def test_one_that_differs_is_enough(session: aiohttp.ClientSession, tmp_path: Path, events: Events) -> None:
    """Whatever the others say, and also while they are still reading."""
    for answer in ([WRONG, RIGHT], [READING, WRONG], [{"state": "unknown", "why": "x"}, WRONG]):
        engine, _ = engine_of(session, answer)
        with pytest.raises(WrongWeightsError, match=r"version 7, .*: 1 of \d tensors .* differ, b first"):
            await checker(tmp_path, events).check(engine, 7, 6)
    assert events.said == [("engine.wrong_weights", {"engine": "engine-0", "version": 7, "tensors": ["b"]})] * 3


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [RIGHT, {**RIGHT, "decisive": False}],
        [RIGHT, {"state": "unknown", "why": "none of its tensors"}],
        [None],
        [{"state": "sure"}],
        {},
        EngineError("engine-0: /collective_rpc answered 500: no such method", status=500),
        EngineError("engine-0: no answer to /collective_rpc within 5 s", unreachable=True, timed_out=True),
    ],
)
async def test_what_shows_nothing_is_not_proved(
    session: aiohttp.ClientSession, tmp_path: Path, events: Events, answer: Any
) -> None:
    """It is said once, and neither right nor wrong."""
    engine, _ = engine_of(session, answer)
    check = checker(tmp_path, events)
    assert not await check.check(engine, 7, 6)
    assert not await check.check(engine, 8, 7)
    ((kind, data),) = events.said
    assert (kind, data["engine"], data["version"]) == ("engine.weights_unproved", "engine-0", 7)


async def test_a_share_that_hangs_proves_nothing(
    session: aiohttp.ClientSession, tmp_path: Path, events: Events
) -> None:
    engine, _ = engine_of(session, [READING])
    assert not await checker(tmp_path, events, limit_s=0.1).check(engine, 7, 6)
    assert "not read within 0.1 s" in events.said[0][1]["why"]


async def test_an_engine_that_has_gone_is_another_matter(
    session: aiohttp.ClientSession, tmp_path: Path, events: Events
) -> None:
    engine, _ = engine_of(session, EngineError("engine-0: refused", unreachable=True, refused=True))
    with pytest.raises(EngineError, match="refused"):
        await checker(tmp_path, events).check(engine, 7, 6)


async def test_what_ran_before_a_start_is_not_known(
    session: aiohttp.ClientSession, tmp_path: Path, events: Events
) -> None:
    """The version before the one that is to be proved stands for it."""
    for version in (3, 5, 8):
        (tmp_path / f"v{version:06d}").mkdir()
    engine, server = engine_of(session, [RIGHT])
    check = checker(tmp_path, events)
    await check.check(engine, 5, -1)
    await check.check(engine, 3, -1)
    assert [Path(args[1]).name for args in server.asked] == ["v000003", ""]


async def test_engines_are_asked_again(
    session: aiohttp.ClientSession, tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that serve and are not being updated; with another number each time, and so by other tensors."""
    monkeypatch.setattr(proving, "PROVE_AGAIN_S", 0.01)
    (serving, asked), (loading, left_alone), (without, unasked) = (
        engine_of(session, [RIGHT], [RIGHT], [WRONG]) for _ in range(3)
    )
    for engine in (serving, loading):
        engine.serve(4, proved_s=0.0)
    told: asyncio.Queue[tuple[Engine, int]] = asyncio.Queue()

    async def on_wrong(engine: Engine, incarnation: int, error: WrongWeightsError) -> None:
        assert "version 4" in str(error)
        await told.put((engine, incarnation))

    watch = asyncio.create_task(checker(tmp_path, events).watch([serving, loading, without], [loading], on_wrong))
    async with asyncio.timeout(120):
        assert await told.get() == (serving, serving.incarnation)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    assert left_alone.asked == unasked.asked == []
    numbers = [args[2] for args in asked.asked]
    assert len(set(numbers)) == len(numbers) >= 3
