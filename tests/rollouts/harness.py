"""A run directory, stub engines, the real orchestrator, and a trainer that only asks and publishes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_blocks
from handoff_lab import model_directory, publish
from patience import patience
from stub_engine import StubEngine

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.config.recipe import Recipe
from hpcrl.dock.client import DockClient
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.wire import BatchShard
from hpcrl.errors import PeerLostError
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.network.auth import Gate
from hpcrl.network.credentials import Credentials
from hpcrl.reporting import reports
from hpcrl.rollouts import parts as orchestrator_parts
from hpcrl.rollouts.core.records import Group, Rollout, decode_rollout
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.environments import Environment
from hpcrl.rollouts.ledger.state import OrchestratorState
from hpcrl.rollouts.orchestrator import Orchestrator
from hpcrl.rollouts.parts import OrchestratorParts
from hpcrl.rollouts.process import first_error
from hpcrl.rollouts.restore import RestoredAttempt, restore_attempt
from hpcrl.rollouts.weights import updates as weight_updates
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.role import Endpoints, Member, RoleContext, restore_path
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import HandoffStore, VersionCommitter

WORDS = {"name": "words", "kind": "words"}
CALCULATOR = {"name": "calculator", "kind": "calculator"}


def impatient(monkeypatch: pytest.MonkeyPatch, *, lost_after_s: float) -> None:
    """The orchestrator looks at engines and retries in tenths of a second, and waits so long without any engine."""
    monkeypatch.setattr(engine_pool, "WATCH_S", 0.1)
    monkeypatch.setattr(engine_pool, "HEALTH_S", 0.3 * patience())
    monkeypatch.setattr(weight_updates, "_RETRY_S", 0.02)
    monkeypatch.setattr(orchestrator_parts, "engines_lost_after_s", lambda run: lost_after_s)


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


Replica = StubEngine | Sequence[StubEngine]
"""An engine, or the ranks of a wide one."""


def servers_of(replicas: Sequence[Replica]) -> list[StubEngine]:
    """All servers of some replicas."""
    return [each for replica in replicas for each in ([replica] if isinstance(replica, StubEngine) else replica)]


def urls_of(replica: Replica) -> tuple[str, ...]:
    """URLs of all servers of a replica."""
    return tuple(server.url for server in servers_of([replica]))


def consumed_dir(run: RunDir) -> Path:
    """Return the directory with the files of steps when all are written: a batch waits a second for its own."""
    assert reports.flush(60.0, directory=run.rollouts_dir)
    return run.rollouts_dir


class Loop:
    """One attempt under test."""

    def __init__(
        self,
        run: RunDir,
        engines: Sequence[Replica],
        *,
        elastic: bool = False,
        router: str | None = None,
        roles: Sequence[str] = (),
    ) -> None:
        self.run, self.engines = run, servers_of(engines)
        self.recipe = run.recipe()
        self.store = HandoffStore(run.weights_dir)
        self.attempt = run.attempts()[-1]
        # behind the dock are a warehouse or the two ports of a pool's master
        url = f"http://127.0.0.1:{free_blocks([3])[0]}"
        self.dock_url = url
        if elastic:
            self.tell_members(*engines)
        else:
            urls: dict[str, list[str]] = {"orchestrator": [url]}
            servers: dict[str, list[tuple[str, ...]]] = {}
            for role, engine in zip(roles or ["engine"] * len(engines), engines, strict=True):
                own = urls_of(engine)
                urls.setdefault(role, []).append(own[0])
                servers.setdefault(role, []).append(own if len(own) > 1 else ())
            urls |= {} if router is None else {"router": [router]}
            Endpoints(urls=urls, servers=servers).write(run, self.attempt)
        entry = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
        step = None if entry is None else entry.step
        RestoreDecision(step=step, verified="content", seconds=0.0, skipped=[]).write(restore_path(run, self.attempt))
        self.context = RoleContext(run, attempt=self.attempt, role="orchestrator", replica=0, rank=0)
        self.orchestrator = Orchestrator(self.context)
        # a machine that is busy for a while is not what these tests are about
        self.client = DockClient(url, credentials=self.context.credentials, wait_timeout_s=60.0, connect_timeout_s=5.0)
        self.work: asyncio.Task[None] | None = None
        self._writer: VersionCommitter | None = None

    def tell_members(self, *engines: Replica | None, start: int = 1) -> None:
        """Replace the endpoints: engines that come and go, by replica; None for one that is not there."""
        there = [(i, urls_of(engine)) for i, engine in enumerate(engines) if engine is not None]
        found = [Member(i, start, urls[0], urls if len(urls) > 1 else ()) for i, urls in there]
        Endpoints(urls={"orchestrator": [self.dock_url]}, members={"engine": found}).write(self.run, self.attempt)

    async def ask(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call the trainer's client in a thread, failing at once where the orchestrator fails."""
        call = asyncio.ensure_future(asyncio.to_thread(getattr(self.client, method), *arguments, **keywords))
        assert self.work is not None
        await asyncio.wait([call, self.work], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            self.work.result()
        try:
            return await call
        except PeerLostError as error:
            if "is stopping" not in str(error):
                raise
            # an orchestrator that fails refuses requests before its work has ended
            await asyncio.wait([self.work], timeout=10.0)
            if self.work.done():
                self.work.result()
            raise

    async def publish(self, version: int) -> None:
        """A version (the stub reads its name only), and the word that it is there."""
        if version not in self.store.versions():
            model = model_directory(self.store.root.parent / "model")
            if self._writer is None:
                self._writer = await asyncio.to_thread(VersionCommitter.claim, self.store.root, self.attempt)
            await asyncio.to_thread(publish, self._writer, version, model, tensors=1, shards=1, words=1)
        await self.ask("published", version)

    @property
    def parts(self) -> OrchestratorParts:
        """Parts of the orchestrator; InvalidStateError before it is restored."""
        return self.orchestrator._built.result()

    @property
    def environments(self) -> Sequence[Environment]:
        return self.orchestrator._environments

    def is_restored(self) -> bool:
        return self.orchestrator._built.done()

    async def restore(self) -> RestoredAttempt:
        """Restore the attempt here, in place of the orchestrator."""
        async with contextlib.AsyncExitStack() as closing:
            return await restore_attempt(self.context, self.recipe, self.environments, closing=closing)

    def last_groups(self) -> list[Group]:
        """What the last batch was made from."""
        taken = self.parts.scheduler._taken.find(self.parts.batch_server.step)
        assert taken is not None
        return taken.groups

    def last_rollouts(self) -> list[Rollout]:
        """The same with their columns, as they are on disk."""
        stored = [rollout for group in self.last_groups() for rollout in group.rollouts]
        return [decode_rollout(read_payload(self.run.rollouts_dir / "payload", each.place)) for each in stored]

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

    async def checkpoint(self, step: int) -> OrchestratorState:
        """A joint checkpoint with an empty trainer part; returns what it has of the orchestrator."""
        state = await self.ask("snapshot", step)
        writer = CheckpointWriter.claim(self.run.checkpoints_dir, self.attempt)
        writer.stage(step)
        writer.commit(step=step, world_size=1, files={}, orchestrator_state=state, started_at_s=0.0)
        return OrchestratorState.decode(state)

    def events(self, kind: str) -> list[Event]:
        # longer than a reader waits for those of its own process
        reports.flush(10.0, directory=self.run.events_dir)
        return [event for event in read_events(self.run) if event.kind == kind]

    async def until(self, condition: Any, timeout_s: float = 10.0) -> None:
        """Wait for ``condition()``; for longer while the machine is busy."""
        began_s, most = time.monotonic(), patience()
        while not condition():
            most = max(most, patience())
            if time.monotonic() - began_s > timeout_s * most:
                raise TimeoutError
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(
    run: RunDir,
    *engines: Replica,
    publish: int | None = 0,
    elastic: bool = False,
    later: Sequence[Replica] = (),
    router: str | None = None,
    roles: Sequence[str] = (),
) -> AsyncIterator[Loop]:
    """Start engines and the orchestrator.

    ``publish`` is the first version. With ``elastic`` engines come and go, and those of ``later`` serve, but are no
    members yet. ``router`` is the URL of one, ``roles`` are those of engines where they have sides.
    """
    for server in servers_of((*engines, *later)):
        if not server.port:
            if router is None:  # that of a test may stand in between, which has no token
                server.gate = Gate("stub", Credentials.of_run(run.path, run.attempts()[-1]))
            await server.start()
    loop = Loop(run, engines, elastic=elastic, router=router, roles=roles)
    loop.work = asyncio.create_task(_unwrapped(loop.orchestrator))
    try:
        if publish is not None:
            await loop.publish(publish)
            # it reads its ledger first; tests look at its parts
            work = loop.work
            await loop.until(lambda: loop.is_restored() or work.done())
        yield loop
    finally:
        loop.work.cancel()
        with contextlib.suppress(BaseException):
            await loop.work
        for server in servers_of((*engines, *later)):
            await server.stop()


async def _unwrapped(orchestrator: Orchestrator) -> None:
    try:
        await orchestrator.run()
    except BaseExceptionGroup as group:
        raise first_error(group) from None
