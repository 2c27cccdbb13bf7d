"""The orchestrator: one asyncio process that puts the parts together.

Start: serve the dock, restore, wait for engines, wait for the trainer's first version, load it everywhere,
evaluate it where the recipe wants that, and roll out. End: SIGTERM, or an error of any part.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from hpcrl.config.sampling import EvaluationSampling, SamplingConfig
from hpcrl.errors import CheckpointError, ConfigError, EnvironmentFailedError
from hpcrl.rollouts.batches.columns import RolloutColumns
from hpcrl.rollouts.batches.http import serve_dock
from hpcrl.rollouts.batches.server import BatchServer, ConflictError
from hpcrl.rollouts.batches.warehouse import WarehouseProcess
from hpcrl.rollouts.distillation.teacher import Teacher
from hpcrl.rollouts.distillation.vocabulary import Probe
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.deadlines import engines_lost_after_s, make_fleet_watch
from hpcrl.rollouts.engines.disaggregated_pool import DisaggregatedPool
from hpcrl.rollouts.engines.membership import Membership
from hpcrl.rollouts.engines.replica_client import client_of
from hpcrl.rollouts.engines.routed_pool import make_pool
from hpcrl.rollouts.engines.router_client import RouterClient
from hpcrl.rollouts.environments import build_environments, hosted
from hpcrl.rollouts.files import RolloutFiles
from hpcrl.rollouts.ledger import RolloutLedger
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.restore import open_ledger, restored_state, take_up
from hpcrl.rollouts.sampling.conversation import Sampler
from hpcrl.rollouts.sampling.data_order import DataOrder
from hpcrl.rollouts.sampling.evaluation import Evaluator, evaluated_versions, held_out_sets
from hpcrl.rollouts.sampling.failures import FailureCount, FailureReport
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsSettings, answer_limits
from hpcrl.rollouts.sampling.routes_room import RoutesRoom
from hpcrl.rollouts.sampling.scheduler import Scheduler
from hpcrl.rollouts.sampling.staleness import StalenessAccount
from hpcrl.rollouts.supervised import Supervised
from hpcrl.rollouts.telemetry.gauges import gauges
from hpcrl.rollouts.telemetry.lag import LagMonitor
from hpcrl.rollouts.telemetry.metrics_text import render_metrics
from hpcrl.rollouts.telemetry.run_metrics import read_run
from hpcrl.rollouts.weights.make import make_updater
from hpcrl.rollouts.weights.turns import TurnUpdater
from hpcrl.runs.refusals import gate_of
from hpcrl.runs.role import Endpoints, Member, RoleContext
from hpcrl.runs.rollout_failures import EnvironmentFailures, failures_path

__all__ = ["Orchestrator"]

_log = logging.getLogger(__name__)

_KEEPALIVE_S = 4.0
"""Shorter than a server's (uvicorn's is 5 s): else a request now and then meets a connection that just closed."""
_BEAT_S = 2.0
_GC_THRESHOLD = 100_000


class Orchestrator:
    """All parts of one attempt; a `hpcrl.rollouts.batches.http.Dock`.

    Attributes
    ----------
    stopping:
        Set when the process is asked to end; the dock then answers 410.
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
        try:
            self._environments = build_environments(self._recipe, on_lost=self._environment_lost)
        except ConfigError as error:
            lines = "\n".join(f"{f.key}: {f.what}\n    hint: {f.hint}" for f in error.findings)
            raise EnvironmentFailedError(lines) from error
        self._lag, self._teacher = LagMonitor(), Teacher.of(self._recipe)
        rollouts = self._recipe.rollouts
        self._failures = FailureCount(
            rollouts.failures, max_in_flight=rollouts.max_in_flight, on_failing=self._rollouts_fail
        )
        self._restored = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first_version: int | None = None
        self._finished: asyncio.Task[None] | None = None
        self._ledger: RolloutLedger | None = None

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
            # for addresses of the run alone: every request brings the token; each has a time limit of its own
            headers, timeout = self._context.credentials.headers, aiohttp.ClientTimeout(total=None)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
            http = await stack.enter_async_context(session)
            stack.push_async_callback(self._close_ledger)
            if self._teacher is not None:
                stack.push_async_callback(self._teacher.aclose)
            gate = gate_of(self._context, "dock")
            await stack.enter_async_context(serve_dock(self, gate, host=host, port=port))
            self._http = http
            self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._tasks.create_task(self._raise_failure())
            self._tasks.create_task(self._lag.run())
            self._tasks.create_task(self._report_progress())
            await self._restore()
            self._build(http, endpoints)
            await self._start()

    async def _report_progress(self) -> None:
        """Tell the supervisor that the event loop turns, and what it has done."""
        reporter = self._context.progress()
        failures = FailureReport(failures_path(self._context.run, self._context.attempt), self._failures)
        try:
            while True:
                if self._restored.is_set():
                    finished, served = self._counters.finished, self._pool.version
                    reporter.beat("running", rollouts=finished, step=self._batch_server.step, version=served)
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

    def _routes_full(self, rollouts: int, limit_gib: float) -> None:
        self._events.emit("rollouts.routes_full", rollouts=rollouts, limit_gib=round(limit_gib, 3))

    def _environment_lost(self, name: str, why: str) -> None:
        self._events.emit("environment.lost", environment=name, why=why)

    # -- start

    async def _restore(self) -> None:
        self._state = await restored_state(self._context, self._recipe)
        self._order = DataOrder(self._recipe, self._environments)
        # first the fence: an orchestrator of an older attempt that is late must not write into the ledger
        run, attempt = self._context.run, self._context.attempt
        self._files = await asyncio.to_thread(RolloutFiles.claim, run.rollouts_dir, attempt)
        self._ledger = await asyncio.to_thread(open_ledger, self._context, self._recipe, self._state.step)
        self._state, self._restart, self._found = await take_up(self._ledger, self._state, self._order)

    async def _close_ledger(self) -> None:
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close)

    def _build(self, http: aiohttp.ClientSession, endpoints: Endpoints) -> None:
        recipe, state, run = self._recipe, self._state, self._context.run
        assert self._ledger is not None
        self._events = self._context.events()
        self._counters = state.counters

        routes = RoutedExpertsSettings.of(recipe)
        limits = answer_limits(recipe, routes)

        def make_client(member: Member, role: str = "engine") -> EngineClient:
            name = f"{role}-{member.replica}"
            return client_of(http, name=name, url=member.url, servers=member.servers, limits=limits)

        supervised = Supervised(self._context)
        elastic = "engine" in endpoints.members
        members = endpoints.members["engine"] if elastic else endpoints.fixed("engine")
        sides = [make_client(member, role) for role in ("prefill", "decode") for member in endpoints.fixed(role)]
        config = recipe.rollouts
        # whether a router hands parts on from one side to the other was not tried
        # the rest of an answer is sampled with another seed: what is to be replayed begins anew
        self._stream_interval = 0 if sides or config.order == "deterministic" else config.stream_interval
        router = None
        if "router" in endpoints.urls:
            ours = recipe.engine.router.kind == "dynamo"
            router = RouterClient(
                http, name="router", url=endpoints.one("router"), hands_on_content_types=ours, limits=limits
            )
        self._pool = make_pool(
            [make_client(member) for member in members] + sides,
            router,
            routed=partial(DisaggregatedPool, supervised=supervised) if sides else None,
            events=self._events,
            counters=self._counters,
            request_timeout_s=config.request_timeout_s,
            max_retries=config.max_retries,
            lost_after_s=engines_lost_after_s(run),
            on_unusable=supervised.restart_engine,
        )
        chat = recipe.model.chat
        renderer = Renderer.of_model(Path(recipe.model.path), chat_format=chat.format, variables=chat.variables)
        self._updater = make_updater(
            recipe,
            run,
            pool=self._pool,
            events=self._events,
            on_served=self._on_served,
            on_stale=supervised.restart_engine,
            on_wrong=supervised.replace_engine,
            attempt=self._context.attempt,
            choose=None if recipe.rollouts.order == "arrival" else self._choose_version,
        )
        if elastic:
            membership = Membership(
                self._context,
                pool=self._pool,
                updater=self._updater,
                events=self._events,
                members=members,
                make_client=make_client,
            )
            self._tasks.create_task(membership.run())
        self._scheduler = Scheduler(
            config=config,
            order=self._order,
            sampler=self._sampler(renderer, config.sampling, routes=routes),
            account=StalenessAccount(
                groups_per_step=config.rollouts_per_step // config.group_size,
                max_off_policy_steps=config.max_off_policy_steps,
                ready_batches=config.ready_batches,
                step=state.step,
                waiting=len(state.finished),
            ),
            counters=self._counters,
            next_index=state.next_index,
            restart=self._restart,
            finished=state.finished,
            parts={index: group.rollouts for index, group in self._found.parts.items()},
            turns=self._found.turns,
            journal=self._ledger,
            room=RoutesRoom.of(recipe, routes, on_full=self._routes_full),
            failures=self._failures,
            teacher=self._teacher,
        )
        server = WarehouseProcess(self._context, self._ledger.warehouse, spawn=self._tasks.create_task)
        self._gauges = partial(gauges, self._scheduler, self._lag, self._ledger)

        def held_out(sampling: EvaluationSampling) -> Sampler:
            return self._sampler(renderer, sampling.beside(config.sampling), routes=routes and routes.unkept())

        own = recipe.evaluation.sampling
        self._evaluator = Evaluator(
            recipe=recipe,
            environments=self._environments,
            sampler=held_out(own),
            updater=self._updater,
            events=self._events,
            done=evaluated_versions(run, up_to=state.step),
            sets=held_out_sets(
                run,
                recipe,
                self._environments,
                sampler_of=lambda temperature: held_out(own.model_copy(update={"temperature": temperature})),
                up_to=state.step,
            ),
        )
        self._batch_server = BatchServer(
            recipe=recipe,
            scheduler=self._scheduler,
            counters=self._counters,
            gauges=self._gauges,
            columns=RolloutColumns(self._ledger.payload_dir, server.locate, decode=renderer.full_text),
            files=self._files,
            journal=self._ledger,
            spawn=self._tasks.create_task,
        )
        self._restored.set()

    def _sampler(
        self, renderer: Renderer, sampling: SamplingConfig, *, routes: RoutedExpertsSettings | None
    ) -> Sampler:
        return Sampler(
            self._pool,
            renderer,
            temperature=sampling.temperature,
            sampling=sampling,
            max_model_len=self._recipe.engine.max_model_len,
            stream_interval=self._stream_interval,
            routes=routes,
            rows=KnownRows.of(self._recipe, self._counters) if routes is not None and routes.keep else None,
        )

    async def _start(self) -> None:
        """From served dock to rolling out."""
        timeout_s, step = self._recipe.orchestrator.wait_timeout_s, self._state.step
        await self._pool.wait_healthy(timeout_s=timeout_s)
        self._tasks.create_task(self._pool.watch())
        if self._teacher is not None:
            self._teacher.count_in(self._counters)
            probe = Probe.of_model(Path(self._recipe.model.path))
            limit = self._recipe.engine.max_model_len
            await self._teacher.check(probe, max_model_len=limit, timeout_s=timeout_s)
        watch = make_fleet_watch(
            self._context,
            self._recipe.rollouts,
            http=self._http,
            pool=self._pool,
            updater=self._updater,
            scheduler=self._scheduler,
            events=self._events,
        )
        self._tasks.create_task(watch.run())
        if self._first_version is not None:
            await self._announce(self._first_version)
        version = await self._updater.wait_announced(timeout_s=timeout_s)
        self._tasks.create_task(self._updater.run())
        await self._updater.wait_served(version)
        self._events.emit("orchestrator.started", step=step, finished_groups=len(self._state.finished))
        self._evaluate_due(step, exactly=True)
        # What exists now stays, and what comes is freed by counting references: the garbage collector found some
        # twenty objects in each pass of 30 to 100 ms. It still runs where objects pile up.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        self._lag.reset()  # loading a tokenizer blocks, and nobody waits yet
        self._tasks.create_task(self._scheduler.run())

    def _choose_version(self, newest: int) -> int:
        return self._scheduler.choose_version(newest)

    def _on_served(self, version: int) -> None:
        self._scheduler.serve(version)
        # while an evaluation goes on, one that comes due waits for the next version
        if version == self._state.step or self._finished is not None or self._evaluator.busy:
            return
        # where engines take turns with the trainer, its turn waits: else an answer would be of two versions
        self._evaluate_due(version, exactly=self._recipe.engine.is_colocated)

    def _evaluate_due(self, version: int, *, exactly: bool) -> None:
        due, sets = self._evaluator.take(version), self._evaluator.take_sets(version)
        if due is not None or sets:
            self._tasks.create_task(self._evaluator.evaluate(version, due=due, exactly=exactly, sets=sets))

    async def _announce(self, version: int) -> None:
        if self._updater.announced is None and version != self._state.step:
            message = (
                f"the trainer began with version {version}, the orchestrator restored step {self._state.step}: "
                "both must resume from the same checkpoint"
            )
            self._fail(CheckpointError(message))
            raise ConflictError(message)
        await self._updater.announce(version)

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _raise_failure(self) -> None:
        await self._failure

    # -- the dock

    async def batch(self, step: int, *, rank: int, world_size: int, wait_s: float, ahead: bool) -> bytes | None:
        """One shard (see `hpcrl.rollouts.batches.server.BatchServer.batch`).

        ConflictError also where there is no such rank, or the trainer began with another step than was restored.
        """
        if not await self._is_restored(wait_s):
            return None
        self._batch_server.check_asker(rank, world_size)  # before anything is believed of the request
        if self._updater.announced is None:
            # who asks for step s has published version s - 1
            await self._announce(step - 1)
        data = await self._batch_server.batch(step, rank=rank, world_size=world_size, wait_s=wait_s, ahead=ahead)
        if data is not None and isinstance(self._updater, TurnUpdater):
            return data if await self._updater.let_train(step, wait_s=wait_s) else None
        return data

    async def trained(self, step: int) -> None:
        """The trainer waits for the batch behind ``step``."""
        if self._restored.is_set():
            self._batch_server.trained(step)

    async def published(self, version: int) -> None:
        """The trainer has published ``version``; the first must be the restored step (ConflictError where not)."""
        if self._restored.is_set():
            await self._announce(version)
        elif self._first_version is None:
            self._first_version = version

    async def snapshot(self, step: int) -> bytes:
        """The state after ``step``, encoded.

        ConflictError before the orchestrator is restored, or where `BatchServer.snapshot` refuses.
        """
        if not self._restored.is_set():
            raise ConflictError("a snapshot was asked for before the orchestrator was restored")
        assert self._ledger is not None
        self._ledger.protect(step)
        # taken here, between two events; encoded elsewhere, because it may be large
        return await asyncio.to_thread(self._batch_server.snapshot(step).encode)

    async def finish(self, version: int, *, wait_s: float) -> bool:
        """End rolling out, bring all engines to ``version`` and evaluate it; whether that is done within ``wait_s``.

        ConflictError where this is the first version that is announced, and not the restored step.
        """
        if not await self._is_restored(wait_s):
            return False
        if self._finished is None:
            await self._announce(version)
            self._finished = self._tasks.create_task(self._finish(version))
        await asyncio.wait([self._finished], timeout=wait_s)
        return self._finished.done()

    def metrics(self) -> str:
        """Prometheus text."""
        if not self._restored.is_set():
            return ""
        return render_metrics(
            self._counters.as_dict(), self._gauges(), {engine.name: engine for engine in self._pool.engines}
        )

    async def run_metrics(self) -> str:
        """Prometheus text of all parts that have one."""
        if not self._restored.is_set():
            return ""
        engines = {engine.name: [server.url for server in engine.client.servers] for engine in self._pool.engines}
        return await read_run(self._http, self._context.endpoints().urls, engines, own=self.metrics())

    async def _is_restored(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._restored.wait()
        return self._restored.is_set()

    async def _finish(self, version: int) -> None:
        await self._scheduler.drain()
        await self._updater.wait_served(version)
        due, sets = self._evaluator.take(version), self._evaluator.take_sets(version, last=True)
        await self._evaluator.evaluate(version, due=version if due is None else due, exactly=True, sets=sets)
