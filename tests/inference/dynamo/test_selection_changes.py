"""Engines that enter and leave Dynamo's selection, asked for by callers that go away in the middle of it."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from hpcrl.inference.dynamo import selection as module
from hpcrl.inference.dynamo.selection import CandidateEngine, Selection


class Service:
    """Dynamo's selection service, which is in no environment of these tests; its calls wait for `go`."""

    def __init__(self, **_: Any) -> None:
        self.workers: set[int] = set()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def upsert_worker(self, worker: dict[str, Any]) -> None:
        self.workers.add(worker["worker_id"])
        self.asked.set()
        await self.go.wait()

    async def delete_worker(self, number: int) -> None:
        self.asked.set()
        await self.go.wait()
        self.workers.discard(number)


class Events:
    """What forwards an engine's events."""

    open = 0

    def __init__(self, source: str) -> None:
        self.endpoint = source
        Events.open += 1

    async def close(self) -> None:
        Events.open -= 1


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> tuple[Selection, Service, CandidateEngine]:
    core = ModuleType("dynamo._core")
    core.SelectionService = Service  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dynamo", ModuleType("dynamo"))
    monkeypatch.setitem(sys.modules, "dynamo._core", core)
    monkeypatch.setattr(module, "SaltedEvents", Events)
    monkeypatch.setattr(Events, "open", 0)
    selection = Selection(model="m", block_size=16, events_offset=100, session_ttl_s=None)
    return selection, selection._service, CandidateEngine("http://127.0.0.1:8000")


async def test_who_enters_is_known_on_both_sides(scene: tuple[Selection, Service, CandidateEngine]) -> None:
    selection, service, worker = scene
    asking = asyncio.create_task(selection.enter(worker))
    await service.asked.wait()
    asking.cancel()
    service.go.set()
    await selection.leave(CandidateEngine("http://127.0.0.1:9000"))  # behind it
    assert ({worker.number}, set(selection._chosen), Events.open) == (service.workers, service.workers, 1)


async def test_who_leaves_is_known_on_neither(scene: tuple[Selection, Service, CandidateEngine]) -> None:
    selection, service, worker = scene
    service.go.set()
    await selection.enter(worker)
    service.asked.clear()
    service.go.clear()
    asking = asyncio.create_task(selection.leave(worker))
    await service.asked.wait()
    asking.cancel()
    service.go.set()
    await selection.enter(worker)  # behind it, under another number
    assert (service.workers, Events.open, worker.number) == ({2}, 1, 2)
