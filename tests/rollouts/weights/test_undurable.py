"""Engines and versions that are announced before they are durable: who keeps what, and what is tried again when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from handoff_lab import model_directory, publish, write_files
from patience import patience

from hpcrl.config.load import load_recipe
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines.client import EngineClient, EngineError
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.weights.exchange import look_at
from hpcrl.rollouts.weights.make import make_updater
from hpcrl.rollouts.weights.undurable import UndurableVersions
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.write.fabric_records import FabricRecords

LONG_S = 60.0


class Trainer:
    """Writes durable versions and announces others, whose memory no engine here reads."""

    def __init__(self, root: Path, attempt: int = 1) -> None:
        self.root, self.writer = root, VersionCommitter.claim(root, attempt)
        self.records = FabricRecords(self.writer.fence, protocol="tcp", timeout_s=1.0)

    @property
    def model(self) -> Path:
        return model_directory(self.root.parent / "model")

    def publish(self, version: int) -> None:
        publish(self.writer, version, self.model)

    def announce(self, version: int) -> None:
        results = write_files(self.writer, version)
        manifest = self.writer.prepare(version=version, shards=results, model_dir=self.model, producer="lab").manifest
        self.records.keep_newest(0)
        self.records.announce(manifest, {})
        self.records.write(manifest, (), ())

    def make_durable(self, version: int) -> None:
        self.writer.discard(version)
        self.publish(version)


class Reader(EngineClient):
    """An engine that loads durable versions, and announced ones that it reaches."""

    def __init__(self, session: aiohttp.ClientSession, store: HandoffStore, *, name: str, in_place: bool) -> None:
        super().__init__(session, name=name, url="http://node:8000")
        self.store, self.in_place = store, in_place
        self.reaches: set[int] = set()
        self.has, self.staged, self.asked = -1, -1, list[int]()
        self.is_well = True

    async def problem(self, *, timeout_s: float) -> EngineError | None:
        return None if self.is_well else EngineError(f"{self.name}: is not well", unreachable=True)

    async def weight_version(self, *, timeout_s: float) -> str | None:
        return str(self.has)

    async def freeze(self, *, timeout_s: float) -> asyncio.Task[Any] | None:
        return None

    def _can_load(self, version: int) -> bool:
        return version in self.reaches or version in self.store.versions()

    async def control(self, path: str, value: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        value = value or {}
        if path == "/update_weights":
            return self._update(**value["update_info"])
        if path == "/collective_rpc":
            return {"results": [self._worker_answer(value["method"])]}
        if path == "/finish_weight_update":
            self.has = int(value["weight_version"])
        return {}

    def _update(self, path: str, stage: bool = False, **_: Any) -> dict[str, Any]:
        version = self.store.version_of(Path(path))
        if not stage:
            assert self._can_load(version), "requests were frozen for a version that cannot be had"
            return {}
        self.asked.append(version)
        self.staged = version
        if self.in_place:
            return {}
        if self._can_load(version):
            return {"version": version, "skipped": []}
        self.staged = self.has if self.has >= 0 else max(v for v in self.store.versions() if v < version)
        return {"version": self.staged, "skipped": [{"version": version, "reason": "not durable"}]}

    def _worker_answer(self, method: str) -> str:
        if method == "staged_problem":
            return "" if self._can_load(self.staged) else "it is not durable"
        if method == "staged_handoff":
            return "True"
        raise EngineError("no proof here")


class Scene:
    """Engines of a run over the fabric, their updater and a trainer."""

    def __init__(self, session: aiohttp.ClientSession, run: RunDir, events: EventWriter, *, in_place: bool) -> None:
        self.run, self.trainer = run, Trainer(run.weights_dir)
        store = HandoffStore(run.weights_dir)
        self.readers = [Reader(session, store, name=f"engine-{i}", in_place=in_place) for i in range(2)]
        self.pool = EnginePool(self.readers, counters=Counters(), request_timeout_s=5.0, max_retries=0)
        self.stale: list[str] = []
        recipe = load_recipe("quickstart", ["handoff.transport=fabric", "handoff.durable_every=3"]).value
        self.updater = make_updater(
            recipe,
            run,
            pool=self.pool,
            events=events,
            on_served=lambda version: None,
            on_stale=lambda engine, why: self.stale.append(why),
            choose=None,
        )

    def versions(self) -> list[int]:
        return [engine.version for engine in self.pool.engines]

    async def until_serving(self, *versions: int) -> None:
        async with asyncio.timeout(LONG_S * patience()), self.pool.changed:
            await self.pool.changed.wait_for(lambda: self.versions() == list(versions))

    async def until_skipped(self, engine: str, version: int) -> None:
        async with asyncio.timeout(LONG_S * patience()):
            while (engine, version) not in self.skipped():
                await asyncio.sleep(0.02)

    def skipped(self) -> list[tuple[str, int]]:
        events = read_events(self.run, kind="engine.version_skipped")
        return [(event.data["engine"], event.data["version"]) for event in events]

    def none_was_lost(self) -> bool:
        return not self.stale and all(engine.incarnation == 0 for engine in self.pool.engines)


@pytest.fixture(params=[False, True], ids=["embedded", "vllm"])
async def scene(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    run = RunDir(tmp_path / "run")
    attempt = run.start_attempt()
    events = EventWriter(run, attempt=attempt, writer="orchestrator-0")
    async with aiohttp.ClientSession() as session:
        scene = Scene(session, run, events, in_place=request.param)
        scene.trainer.publish(1)
        work = asyncio.create_task(scene.updater.run())
        await scene.updater.announce(1)
        await scene.until_serving(1, 1)
        yield scene
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    events.close()


async def test_an_engine_keeps_its_version_until_the_next_or_the_durable_one_comes(scene: Scene) -> None:
    one, other = scene.readers
    one.reaches.add(2)
    scene.trainer.announce(2)
    await scene.updater.announce(2)
    await scene.until_skipped("engine-1", 2)
    await scene.until_serving(2, 1)
    assert scene.none_was_lost()
    assert scene.updater.undurable.durable <= 1
    # the next version
    other.reaches.add(3)
    one.reaches.add(3)
    scene.trainer.announce(3)
    await scene.updater.announce(3)
    await scene.until_serving(3, 3)
    # a durable one
    scene.trainer.announce(4)
    await scene.updater.announce(4)
    await scene.until_skipped("engine-0", 4)
    await scene.until_skipped("engine-1", 4)
    assert scene.versions() == [3, 3]
    scene.trainer.make_durable(4)
    await scene.until_serving(4, 4)
    assert scene.none_was_lost()


async def test_a_wait_for_a_version_does_not_fail_before_it_is_durable(scene: Scene) -> None:
    scene.trainer.announce(2)
    await scene.updater.announce(2)
    waiting = asyncio.create_task(scene.updater.wait_served(2))
    await scene.until_skipped("engine-0", 2)
    await scene.until_skipped("engine-1", 2)
    assert not waiting.done()
    scene.trainer.make_durable(2)
    async with asyncio.timeout(LONG_S * patience()):
        await waiting


async def test_an_engine_that_is_started_again_takes_the_newest_durable_version(scene: Scene) -> None:
    one, other = scene.readers
    for reader in scene.readers:
        reader.reaches.add(2)
    scene.trainer.announce(2)
    await scene.updater.announce(2)
    await scene.until_serving(2, 2)
    # a new process, which does not reach the trainer
    one.reaches.clear()
    one.has = -1
    await scene.pool.lose(scene.pool.engines[0], "it was killed")
    scene.pool.engines[0].answered()
    await scene.pool.notify()
    await scene.until_skipped("engine-0", 2)
    await scene.until_serving(1, 2)
    assert not scene.stale
    assert other.asked.count(2) == 1


async def test_versions_are_found_without_a_notice(scene: Scene) -> None:
    for reader in scene.readers:
        reader.reaches.add(2)
    scene.trainer.announce(2)
    await scene.until_serving(2, 2)


async def test_an_engine_that_is_not_well_is_lost(scene: Scene) -> None:
    one, _ = scene.readers
    if not one.in_place:
        pytest.skip("its answer shows that it is well")
    one.is_well = False
    scene.trainer.announce(2)
    await scene.updater.announce(2)
    async with asyncio.timeout(LONG_S * patience()), scene.pool.changed:
        await scene.pool.changed.wait_for(lambda: scene.pool.engines[0].incarnation > 0)


def test_a_version_is_tried_again_after_a_while(tmp_path: Path) -> None:
    trainer, now = Trainer(tmp_path / "weights"), [0.0]
    store = HandoffStore(trainer.root)
    undurable = UndurableVersions(store, clock=lambda: now[0])
    engine: Any = object()
    kept: Engine = engine
    assert (undurable.look(), undurable.durable) == (None, -1)
    trainer.publish(1)
    trainer.announce(2)
    assert (undurable.look(), undurable.durable) == (2, 1)
    assert undurable.choose(kept, 2) == 2
    undurable.wait(kept, 2)
    assert [undurable.choose(kept, target) for target in (1, 2, 3)] == [1, 1, 3]
    assert not undurable.end_waits()
    now[0] = 9.9
    assert not undurable.end_waits()
    now[0] = 10.0
    assert undurable.end_waits()
    assert undurable.choose(kept, 2) == 2
    undurable.wait(kept, 2)
    trainer.make_durable(2)
    assert undurable.look() == 2
    assert undurable.end_waits()
    assert undurable.choose(kept, 2) == 2


def test_the_store_is_listed_only_for_a_version_that_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tmp_path / "weights")
    trainer.publish(1)
    trainer.announce(2)
    store, listed = HandoffStore(trainer.root), list[int]()
    bytes_of = store.open(1).manifest.total_bytes
    numbers = HandoffStore.versions

    def counted(own: HandoffStore) -> list[int]:
        found = numbers(own)
        listed.append(len(found))
        return found

    monkeypatch.setattr(HandoffStore, "versions", counted)
    assert (look_at(store, 1), listed) == ((bytes_of, True), [])
    assert (look_at(store, 2), listed) == ((bytes_of, False), [1])
    assert look_at(store, 3) == (0, False)
