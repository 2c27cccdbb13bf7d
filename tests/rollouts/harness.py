"""A run directory, stub engines, the real orchestrator, and a trainer that only asks and publishes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from stub_engine import StubEngine

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.config.recipe import Recipe
from hpcrl.dock.client import DockClient
from hpcrl.dock.wire import BatchShard
from hpcrl.models.tokenizer import write_character_tokenizer
from hpcrl.rollouts.orchestrator import Orchestrator, _first_error
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.role import Endpoints, RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import HandoffStore

WORDS = {"name": "words", "kind": "words"}
CALCULATOR = {"name": "calculator", "kind": "calculator"}


def make_recipe(model_dir: Path, **changes: Any) -> Recipe:
    """A small recipe; ``changes`` are merged into its sections."""
    value: dict[str, Any] = {
        "name": "test",
        "seed": 7,
        "model": {"path": str(model_dir)},
        "environments": [WORDS],
        "trainer": {"steps": 10, "micro_batch_tokens": 256},
        "rollouts": {
            "rollouts_per_step": 16,
            "group_size": 4,
            "max_in_flight": 32,
            "max_off_policy_steps": 2,
            "request_timeout_s": 5.0,
            "max_retries": 2,
        },
        "evaluation": {"every_steps": 0, "prompts": 4},
        "orchestrator": {"wait_timeout_s": 10.0},
    }
    for key, change in changes.items():
        value[key] = {**value[key], **change} if isinstance(value.get(key), dict) else change
    return Recipe.model_validate(value)


def make_run(path: Path, **changes: Any) -> RunDir:
    """A run directory with a tokenizer and a recipe."""
    run = RunDir(path / "run")
    run.path.mkdir(parents=True)
    write_character_tokenizer(path / "model")
    recipe = make_recipe(path / "model", **changes)
    run.recipe_path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    run.start_attempt()
    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Loop:
    """One attempt under test."""

    def __init__(self, run: RunDir, engines: list[StubEngine]) -> None:
        self.run, self.engines = run, engines
        self.recipe = run.recipe()
        self.store = HandoffStore(run.weights_dir)
        self.attempt = run.attempts()[-1]
        url = f"http://127.0.0.1:{free_port()}"
        urls = {"engine": [engine.url for engine in engines], "orchestrator": [url]}
        Endpoints(urls=urls).write(run, self.attempt)
        context = RoleContext(run, attempt=self.attempt, role="orchestrator", replica=0, rank=0)
        self.orchestrator = Orchestrator(context)
        self.client = DockClient(url, wait_timeout_s=10.0, connect_timeout_s=5.0)
        self.work: asyncio.Task[None] | None = None

    async def ask(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call the trainer's client in a thread, failing at once where the orchestrator fails."""
        call = asyncio.ensure_future(asyncio.to_thread(getattr(self.client, method), *arguments, **keywords))
        assert self.work is not None
        await asyncio.wait([call, self.work], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            self.work.result()
        return await call

    async def publish(self, version: int) -> None:
        """A version directory (empty: the stub reads its name only), and the word that it is there."""
        self.store.path_of(version).mkdir(parents=True, exist_ok=True)
        await self.ask("published", version)

    async def batch(self, step: int) -> BatchShard:
        shard: BatchShard = await self.ask("batch", step, rank=0, world_size=1)
        return shard

    async def train(self, first: int, last: int) -> list[BatchShard]:
        """Steps ``first`` to ``last``; publishes after each."""
        shards = []
        for step in range(first, last + 1):
            shards.append(await self.batch(step))
            await self.publish(step)
        return shards

    async def checkpoint(self, step: int) -> None:
        """A joint checkpoint with an empty trainer part."""
        state = await self.ask("snapshot", step)
        ledger = CheckpointLedger(self.run.checkpoints_dir)
        stage = ledger.stage(step, token="test")
        stage.create()
        ledger.commit(stage, step=step, attempt=self.attempt, world_size=1, orchestrator_state=state, started_at_s=0.0)

    def events(self, kind: str) -> list[Event]:
        return [event for event in read_events(self.run) if event.kind == kind]

    async def until(self, condition: Any, timeout_s: float = 10.0) -> None:
        """Wait for ``condition()``."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(run: RunDir, *engines: StubEngine, publish: int | None = 0) -> AsyncIterator[Loop]:
    """Start engines and the orchestrator; ``publish`` is the first version."""
    for engine in engines:
        if not engine.port:
            await engine.start()
    loop = Loop(run, list(engines))
    loop.work = asyncio.create_task(_unwrapped(loop.orchestrator))
    try:
        if publish is not None:
            await loop.publish(publish)
        yield loop
    finally:
        loop.work.cancel()
        with contextlib.suppress(BaseException):
            await loop.work
        for engine in engines:
            await engine.stop()


async def _unwrapped(orchestrator: Orchestrator) -> None:
    try:
        await orchestrator.run()
    except BaseExceptionGroup as group:
        raise _first_error(group) from None
