"""Orchestrator: one asyncio process that connects the parts.

Start: serve the dock, restore, wait for engines, wait for the trainer's first version, load it everywhere,
evaluate it where the recipe wants that, and roll out. End: SIGTERM, or an error of any part.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from hpcrl.config.evaluation import EvaluationSetConfig
from hpcrl.errors import CheckpointError, ConfigError, EnvironmentFailedError
from hpcrl.rollouts.batches.http import serve_dock
from hpcrl.rollouts.batches.server import ConflictError
from hpcrl.rollouts.distillation.teacher import Teacher
from hpcrl.rollouts.distillation.vocabulary import Probe
from hpcrl.rollouts.environments import build_environments, hosted
from hpcrl.rollouts.environments.workers.worker_events import workers_of
from hpcrl.rollouts.parts import Foundation, OrchestratorParts, build_parts
from hpcrl.rollouts.restore import restore_attempt
from hpcrl.rollouts.sampling.failures import FailureCount, FailureReport
from hpcrl.rollouts.telemetry.deadlines import make_fleet_watch
from hpcrl.rollouts.telemetry.lag import LagMonitor
from hpcrl.rollouts.telemetry.metrics_text import render_metrics
from hpcrl.rollouts.telemetry.run_metrics import read_run
from hpcrl.rollouts.weights.turns import TurnUpdater
from hpcrl.runs.fleet import WorkerView
from hpcrl.runs.refusals import gate_of
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rollout_failures import EnvironmentFailures, FirstFailure, failures_path

_log = logging.getLogger(__name__)

_KEEPALIVE_S = 4.0
"""Keep-alive time in seconds, shorter than a server's (uvicorn's is 5 s): otherwise a request sometimes uses a
connection that was just closed."""
_BEAT_S = 2.0
_GC_THRESHOLD = 100_000


class Orchestrator:
    """All parts of one attempt; a `hpcrl.rollouts.batches.http.Dock`.

    Attributes
    ----------
    stopping:
        Set when the process is asked to end, and when a part has failed; the dock then answers 410.
    """

    def __init__(self, context: RoleContext) -> None:
        """Read the recipe and build environments; nothing is served or sent.

        Raises
        ------
        EnvironmentFailedError
            An environment cannot be built.
        """
        self.stopping = False
        self._context, self._recipe = context, context.run.recipe()
        self._events = context.events()
        try:
            self._workers = workers_of(context, self._recipe, self._events)
            self._environments = build_environments(self._recipe, on_lost=self._environment_lost, workers=self._workers)
        except ConfigError as error:
            lines = "\n".join(f"{f.key}: {f.what}\n    hint: {f.hint}" for f in error.findings)
            raise EnvironmentFailedError(lines) from error
        self._lag = LagMonitor()
        self._teacher = Teacher.of(self._recipe)
        rollouts = self._recipe.rollouts
        self._failures = FailureCount(
            rollouts.failures,
            max_in_flight=rollouts.max_in_flight,
            on_failing=self._rollouts_fail,
            on_evicted=self._sandbox_evicted,
        )
        self._tasks = asyncio.TaskGroup()
        loop = asyncio.get_running_loop()
        self._built: asyncio.Future[OrchestratorParts] = loop.create_future()
        self._failure: asyncio.Future[None] = loop.create_future()
        self._first_version: int | None = None
        self._finished: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Work until cancelled.

        Raises
        ------
        BaseExceptionGroup
            With the error of the part that failed.
        """
        endpoints = await asyncio.to_thread(self._context.endpoints)
        address = urlsplit(endpoints.one("orchestrator"))
        host, port = str(address.hostname), int(address.port or 0)
        async with contextlib.AsyncExitStack() as stack:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            for environment in hosted(self._environments):
                stack.push_async_callback(environment.aclose)
            # only for addresses of the run, because every request carries the token; each request has its own timeout
            headers, timeout = self._context.credentials.headers, aiohttp.ClientTimeout(total=None)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
            http = await stack.enter_async_context(session)
            # the ledger ends after the dock and all tasks
            closing = await stack.enter_async_context(contextlib.AsyncExitStack())
            if self._teacher is not None:
                stack.push_async_callback(self._teacher.aclose)
            if self._workers is not None:
                stack.push_async_callback(self._workers.aclose)
            gate = gate_of(self._context, "dock")
            await stack.enter_async_context(serve_dock(self, gate, host=host, port=port))
            await stack.enter_async_context(self._tasks)
            # left as soon as a task fails: the group then starts no more, which handlers of the dock would ask for
            stack.callback(setattr, self, "stopping", True)
            self._tasks.create_task(self._raise_failure())
            self._tasks.create_task(self._lag.run())
            self._tasks.create_task(self._report_progress())
            if self._workers is not None:
                self._workers.start(endpoints.fixed("env"), http, spawn=self._tasks.create_task)
            parts = build_parts(
                self._foundation(),
                await restore_attempt(self._context, self._recipe, self._environments, closing=closing),
                endpoints=endpoints,
                http=http,
                on_served=self._on_served,
                on_routes_full=self._routes_full,
            )
            # behind the tasks, which have rollouts
            closing.push_async_callback(parts.gateway.aclose)
            self._built.set_result(parts)
            await self._start(parts)
            await asyncio.get_running_loop().create_future()  # until this is cancelled

    def _foundation(self) -> Foundation:
        return Foundation(
            context=self._context,
            recipe=self._recipe,
            environments=self._environments,
            events=self._events,
            failures=self._failures,
            lag=self._lag,
            teacher=self._teacher,
            tasks=self._tasks,
        )

    @property
    def _parts(self) -> OrchestratorParts | None:
        """Return the parts; None until the attempt is restored."""
        return self._built.result() if self._built.done() else None

    async def _report_progress(self) -> None:
        """Report to the supervisor that the event loop runs, and the counts of its work."""
        reporter = self._context.progress()
        failures = FailureReport(failures_path(self._context.run, self._context.attempt), self._failures)
        try:
            while True:
                if (parts := self._parts) is not None:
                    finished, served = parts.counters.finished, parts.pool.version
                    reporter.beat("running", rollouts=finished, step=parts.batch_server.step, version=served)
                    failures.write()
                await asyncio.sleep(_BEAT_S)
        finally:
            failures.write()

    def _rollouts_fail(self, found: EnvironmentFailures) -> None:
        cause, first = next(iter(found.first.items()))
        self._events.emit(
            "rollouts.failing",
            environment=found.environment,
            started=found.started,
            failed=found.total,
            share=round(found.share, 4),
            cause=cause,
            what=first.what,
            where=first.where,
        )

    def _sandbox_evicted(self, environment: str, first: FirstFailure) -> None:
        self._events.emit("sandboxes.evicted", environment=environment, what=first.what)

    def _routes_full(self, rollouts: int, limit_gib: float) -> None:
        self._events.emit("rollouts.routes_full", rollouts=rollouts, limit_gib=round(limit_gib, 3))

    def _environment_lost(self, name: str, why: str) -> None:
        self._events.emit("environment.lost", environment=name, why=why)

    # -- start

    async def _start(self, parts: OrchestratorParts) -> None:
        """Start the parts after the dock is served."""
        timeout_s, state, updater = self._recipe.orchestrator.wait_timeout_s, parts.restored.state, parts.updater
        if parts.membership is not None:
            self._tasks.create_task(parts.membership.run())
        await parts.pool.wait_healthy(timeout_s=timeout_s)
        self._tasks.create_task(parts.pool.watch())
        if self._teacher is not None:
            self._teacher.count_in(parts.counters)
            probe = Probe.of_model(Path(self._recipe.model.path))
            limit = self._recipe.engine.max_model_len
            await self._teacher.check(probe, max_model_len=limit, timeout_s=timeout_s)
        watch = make_fleet_watch(
            self._context,
            self._recipe.rollouts,
            http=parts.http,
            pool=parts.pool,
            updater=updater,
            scheduler=parts.scheduler,
            events=self._events,
            workers=self._worker_views,
        )
        self._tasks.create_task(watch.run())
        if self._first_version is not None:
            await self._announce(parts, self._first_version)
        version = await updater.wait_announced(timeout_s=timeout_s)
        self._tasks.create_task(updater.run())
        await updater.wait_served(version)
        self._events.emit("orchestrator.started", step=state.step, finished_groups=len(state.finished))
        self._evaluate_due(parts, state.step, exactly=True)
        # What exists now stays, and what comes is freed by counting references: the garbage collector found some
        # twenty objects in each pass of 30 to 100 ms. It still runs where objects pile up.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        self._lag.reset()  # loading a tokenizer blocks, and no request is waiting yet
        self._tasks.create_task(parts.scheduler.run())

    def _on_served(self, version: int) -> None:
        parts = self._built.result()
        parts.scheduler.serve(version)
        # during an evaluation, another one that becomes due waits for the next version
        if version == parts.restored.state.step or self._finished is not None or parts.evaluator.busy:
            return
        # colocated engines: the trainer's turn waits, otherwise an answer would mix two versions
        self._evaluate_due(parts, version, exactly=self._recipe.engine.is_colocated)

    def _evaluate_due(self, parts: OrchestratorParts, version: int, *, exactly: bool) -> None:
        evaluator = parts.evaluator
        due, sets = evaluator.take(version), evaluator.take_sets(version)
        if due is not None or sets:
            self._tasks.create_task(evaluator.evaluate(version, due=due, exactly=exactly, sets=sets))

    async def _announce(self, parts: OrchestratorParts, version: int) -> None:
        restored = parts.restored.state.step
        if parts.updater.announced is None and version != restored:
            message = (
                f"the trainer began with version {version}, the orchestrator restored step {restored}: "
                "both must resume from the same checkpoint"
            )
            self._fail(CheckpointError(message))
            raise ConflictError(message)
        await parts.updater.announce(version)

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _raise_failure(self) -> None:
        await self._failure

    # -- the dock

    async def batch(self, step: int, *, rank: int, world_size: int, wait_s: float, ahead: bool) -> bytes | None:
        """Return one shard (see `hpcrl.rollouts.batches.server.BatchServer.batch`).

        Raises
        ------
        ConflictError
            Also where the rank does not exist, or the trainer began with another step than was restored.
        """
        if (parts := await self._wait_parts(wait_s)) is None:
            return None
        server, updater = parts.batch_server, parts.updater
        server.check_asker(rank, world_size)  # checked before the request is used
        if updater.announced is None:
            # a request for step s implies that version s - 1 is published
            await self._announce(parts, step - 1)
        data = await server.batch(step, rank=rank, world_size=world_size, wait_s=wait_s, ahead=ahead)
        if data is not None and isinstance(updater, TurnUpdater):
            return data if await updater.release_batch_when_served(step, wait_s=wait_s) else None
        return data

    async def trained(self, step: int) -> None:
        """Note that ``step`` is trained and that the trainer waits for the next batch."""
        if (parts := self._parts) is not None:
            parts.batch_server.trained(step)

    async def published(self, version: int) -> None:
        """Announce that the trainer has published ``version``.

        Raises
        ------
        ConflictError
            The first version is not the restored step.
        """
        if (parts := self._parts) is not None:
            await self._announce(parts, version)
        elif self._first_version is None:
            self._first_version = version

    async def snapshot(self, step: int) -> bytes:
        """Return the encoded state after ``step``.

        Raises
        ------
        ConflictError
            The orchestrator is not restored yet, or `BatchServer.snapshot` refuses.
        """
        if (parts := self._parts) is None:
            raise ConflictError("a snapshot was asked for before the orchestrator was restored")
        parts.restored.ledger.protect(step)
        # taken in the event loop, so that it is consistent; encoded in a thread, because it may be large
        return await asyncio.to_thread(parts.batch_server.snapshot(step).encode)

    async def finish(self, version: int, *, wait_s: float) -> bool:
        """Stop sampling and evaluate ``version`` on all engines; return whether that is done within ``wait_s``.

        ConflictError where this is the first version that is announced, and not the restored step.
        """
        if (parts := await self._wait_parts(wait_s)) is None:
            return False
        if self._finished is None:
            await self._announce(parts, version)
            self._finished = self._tasks.create_task(self._finish(parts, version))
        await asyncio.wait([self._finished], timeout=wait_s)
        return self._finished.done()

    async def evaluate(self, key: str, given: str, *, seed: int, wait_s: float) -> bytes | None:
        """Return the result of an evaluation of the version that engines serve, as JSON.

        Parameters as in `hpcrl.rollouts.asked_evaluations.AskedEvaluations`; ``given`` is a set of held-out prompts.

        Raises
        ------
        ConflictError
            The run cannot evaluate now.
        ValueError
            ``given`` is not a set of held-out prompts.
        """
        config = EvaluationSetConfig.model_validate_json(given)
        parts = self._parts
        if parts is None or parts.pool.version < 0:
            raise ConflictError("the engines of the run serve no version yet")
        if self._finished is not None:
            raise ConflictError("the run has trained its last step and ends")
        if self._recipe.engine.is_colocated:
            raise ConflictError("trainer and engines of the run take turns on their GPUs")
        if self._recipe.rollouts.order == "deterministic":
            raise ConflictError("the run is deterministic, and its engines compute nothing but its rollouts")
        version = parts.pool.version
        found = await parts.asked.result(key, config, seed=seed, version=version, wait_s=wait_s)
        return None if found is None else msgspec.json.encode(found)

    def metrics(self) -> str:
        """Return the orchestrator's metrics as Prometheus text."""
        if (parts := self._parts) is None:
            return ""
        engines = {engine.name: engine for engine in parts.pool.engines}
        return render_metrics(parts.counters.as_dict(), parts.gauges(), engines, self._worker_views())

    def _worker_views(self) -> list[WorkerView]:
        return [] if self._workers is None else self._workers.views()

    async def run_metrics(self) -> str:
        """Return the metrics of all parts of the run as Prometheus text."""
        if (parts := self._parts) is None:
            return ""
        engines = {engine.name: [server.url for server in engine.client.servers] for engine in parts.pool.engines}
        return await read_run(parts.http, self._context.endpoints().urls, engines, own=self.metrics())

    async def _wait_parts(self, wait_s: float) -> OrchestratorParts | None:
        """Return the parts once the attempt is restored; None where that takes longer than ``wait_s`` seconds."""
        if not self._built.done():
            await asyncio.wait([self._built], timeout=wait_s)
        return self._parts

    async def _finish(self, parts: OrchestratorParts, version: int) -> None:
        evaluator = parts.evaluator
        await parts.scheduler.drain()
        await parts.updater.wait_served(version)
        due, sets = evaluator.take(version), evaluator.take_sets(version, last=True)
        await evaluator.evaluate(version, due=version if due is None else due, exactly=True, sets=sets)
