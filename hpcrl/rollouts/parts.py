"""Build the parts of an orchestrator from what its attempt has restored: engines, rollouts, weights and batches.

This module starts nothing. `hpcrl.rollouts.orchestrator` starts the parts and connects them during the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from hpcrl.config.recipe import Recipe
from hpcrl.config.sampling import EvaluationSampling, SamplingConfig
from hpcrl.rollouts.asked_evaluations import AskedEvaluations
from hpcrl.rollouts.batches.columns import RolloutColumns
from hpcrl.rollouts.batches.server import BatchServer
from hpcrl.rollouts.batches.warehouse import WarehouseProcess
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.staleness import StalenessAccount
from hpcrl.rollouts.distillation.teacher import Teacher
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.disaggregated_pool import DisaggregatedPool
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.engines.replica_client import client_of
from hpcrl.rollouts.engines.routed_pool import make_pool
from hpcrl.rollouts.engines.router_client import RouterClient
from hpcrl.rollouts.environments import Environment
from hpcrl.rollouts.gateway import Gateway
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.restore import RestoredAttempt
from hpcrl.rollouts.sampling.conversation import Sampler
from hpcrl.rollouts.sampling.evaluation import Evaluator, evaluated_versions, held_out_sets
from hpcrl.rollouts.sampling.failures import FailureCount
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsSettings, answer_limits
from hpcrl.rollouts.sampling.routed_experts_budget import RoutedExpertsBudget
from hpcrl.rollouts.sampling.scheduler import Scheduler
from hpcrl.rollouts.supervised import Supervised
from hpcrl.rollouts.telemetry.deadlines import engines_lost_after_s
from hpcrl.rollouts.telemetry.gauges import gauges
from hpcrl.rollouts.telemetry.lag import LagMonitor
from hpcrl.rollouts.weights.make import make_updater
from hpcrl.rollouts.weights.membership import Membership
from hpcrl.rollouts.weights.updates import WeightUpdater
from hpcrl.runs.events import EventWriter
from hpcrl.runs.refusals import report_of
from hpcrl.runs.role import Endpoints, Member, RoleContext


@dataclass(frozen=True, kw_only=True)
class Foundation:
    """Inputs from which the parts of an orchestrator are built, available before it is restored."""

    context: RoleContext
    recipe: Recipe
    environments: Sequence[Environment]
    events: EventWriter
    failures: FailureCount
    lag: LagMonitor
    teacher: Teacher | None
    """Teacher of a distillation; None without one."""
    tasks: asyncio.TaskGroup
    """Tasks that end with the orchestrator, and end it where they fail."""


@dataclass(frozen=True, kw_only=True)
class OrchestratorParts:
    """Parts of one attempt, built and not started."""

    restored: RestoredAttempt
    http: aiohttp.ClientSession
    """HTTP session for addresses of the run only: each request carries the token of the run."""
    pool: EnginePool
    updater: WeightUpdater
    membership: Membership | None
    """None: the engines are those of the start."""
    gateway: Gateway
    """Must be closed when no rollout runs any more."""
    scheduler: Scheduler
    evaluator: Evaluator
    asked: AskedEvaluations
    """Evaluations that people ask for."""
    batch_server: BatchServer
    gauges: Callable[[], dict[str, float]]
    """Returns the gauges of the orchestrator."""

    @property
    def counters(self) -> Counters:
        """Return the counters of rollouts since the run began."""
        return self.restored.state.counters


def gateway_host(recipe: Recipe, endpoints: Endpoints) -> str:
    """Return the address at which the gateway of programs listens: loopback, or that of the dock.

    The supervisor has chosen that one by the interface that the profile names for the node.
    """
    own = urlsplit(endpoints.one("orchestrator")).hostname if recipe.gateway_in_run else None
    return own or "127.0.0.1"


def build_parts(
    base: Foundation,
    restored: RestoredAttempt,
    *,
    endpoints: Endpoints,
    http: aiohttp.ClientSession,
    on_served: Callable[[int], None],
    on_routes_full: Callable[[int, float], None],
) -> OrchestratorParts:
    """Build all parts of an attempt.

    Parameters
    ----------
    on_served:
        Called with each version that all engines serve.
    on_routes_full:
        See `RoutedExpertsBudget`.
    """
    context, recipe, events = base.context, base.recipe, base.events
    run, state, ledger = context.run, restored.state, restored.ledger
    routes = RoutedExpertsSettings.of(recipe)
    supervised = Supervised(context)
    clients = _Clients(base, http, endpoints, routes)
    pool = clients.pool(supervised, state.counters)
    chat = recipe.model.chat
    renderer = Renderer.of_model(
        Path(recipe.model.path), chat_format=chat.format, variables=chat.variables, thinking=chat.thinking
    )
    host = gateway_host(recipe, endpoints)
    gateway = Gateway(state.counters, report=report_of(context, "gateway"), host=host)
    interval = clients.stream_interval
    samplers = _Samplers(recipe, pool, renderer, state.counters, gateway=gateway, stream_interval=interval)
    scheduler = _build_scheduler(
        base,
        restored,
        sampler=samplers.make(recipe.rollouts.sampling, routes),
        room=RoutedExpertsBudget.of(recipe, routes, on_full=on_routes_full),
    )
    updater = make_updater(
        recipe,
        run,
        pool=pool,
        events=events,
        on_served=on_served,
        on_stale=supervised.restart_engine,
        on_wrong=supervised.replace_engine,
        attempt=context.attempt,
        choose=None if recipe.rollouts.order == "arrival" else scheduler.choose_version,
    )
    own_gauges = partial(gauges, scheduler, base.lag, ledger, updater.sources, gateway.gauges)
    warehouse = WarehouseProcess(context, ledger.warehouse, spawn=base.tasks.create_task)
    return OrchestratorParts(
        restored=restored,
        http=http,
        pool=pool,
        updater=updater,
        membership=clients.membership(pool, updater),
        gateway=gateway,
        scheduler=scheduler,
        evaluator=_build_evaluator(base, samplers, updater, up_to=state.step, routes=routes),
        asked=AskedEvaluations(
            recipe,
            base.environments,
            sampler_of=partial(samplers.held_out, routes=routes),
            events=events,
            spawn=base.tasks.create_task,
        ),
        batch_server=BatchServer(
            recipe=recipe,
            scheduler=scheduler,
            counters=state.counters,
            gauges=own_gauges,
            columns=RolloutColumns(ledger.payload_dir, warehouse.locate, decode=renderer.full_text),
            files=restored.files,
            journal=ledger,
            spawn=base.tasks.create_task,
        ),
        gauges=own_gauges,
    )


class _Clients:
    """Clients of the engines and of the router."""

    def __init__(
        self, base: Foundation, http: aiohttp.ClientSession, endpoints: Endpoints, routes: RoutedExpertsSettings | None
    ) -> None:
        self._base, self._http, self._endpoints = base, http, endpoints
        self._limits = answer_limits(base.recipe, routes)
        self._elastic = "engine" in endpoints.members
        self._members = endpoints.members["engine"] if self._elastic else endpoints.fixed("engine")
        self._sides = [self._client(member, role) for role in ("prefill", "decode") for member in endpoints.fixed(role)]
        config = base.recipe.rollouts
        # not streamed: forwarding of parts by a router of disaggregated engines is untested, and the rest of an answer
        # is sampled with another seed, which a deterministic run must not do
        self.stream_interval = 0 if self._sides or config.order == "deterministic" else config.stream_interval

    def _client(self, member: Member, role: str = "engine") -> EngineClient:
        name = f"{role}-{member.replica}"
        return client_of(self._http, name=name, url=member.url, servers=member.servers, limits=self._limits)

    def _router(self) -> RouterClient | None:
        if "router" not in self._endpoints.urls:
            return None
        return RouterClient(
            self._http,
            name="router",
            url=self._endpoints.one("router"),
            hands_on_content_types=self._base.recipe.engine.router.kind == "dynamo",
            limits=self._limits,
        )

    def pool(self, supervised: Supervised, counters: Counters) -> EnginePool:
        config = self._base.recipe.rollouts
        return make_pool(
            [self._client(member) for member in self._members] + self._sides,
            self._router(),
            routed=partial(DisaggregatedPool, supervised=supervised) if self._sides else None,
            events=self._base.events,
            counters=counters,
            request_timeout_s=config.request_timeout_s,
            max_retries=config.max_retries,
            lost_after_s=engines_lost_after_s(self._base.context.run),
            on_unusable=supervised.restart_engine,
        )

    def membership(self, pool: EnginePool, updater: WeightUpdater) -> Membership | None:
        """Return the membership that follows engines which join and leave; None where the fleet is fixed."""
        if not self._elastic:
            return None
        return Membership(
            self._base.context,
            pool=pool,
            updater=updater,
            events=self._base.events,
            members=self._members,
            make_client=self._client,
        )


class _Samplers:
    """Makes samplers of one pool, for training and for evaluations."""

    def __init__(
        self,
        recipe: Recipe,
        pool: EnginePool,
        renderer: Renderer,
        counters: Counters,
        *,
        gateway: Gateway,
        stream_interval: int,
    ) -> None:
        self._recipe, self._pool, self._renderer, self._counters = recipe, pool, renderer, counters
        self._gateway, self._stream_interval = gateway, stream_interval

    def make(self, sampling: SamplingConfig, routes: RoutedExpertsSettings | None) -> Sampler:
        return Sampler(
            self._pool,
            self._renderer,
            temperature=sampling.temperature,
            sampling=sampling,
            max_model_len=self._recipe.engine.max_model_len,
            stream_interval=self._stream_interval,
            routes=routes,
            rows=KnownRows.of(self._recipe, self._counters) if routes is not None and routes.keep else None,
            max_branches=self._recipe.rollouts.max_branches,
            gateway=self._gateway,
        )

    def held_out(self, sampling: EvaluationSampling, routes: RoutedExpertsSettings | None) -> Sampler:
        """Return the sampler of an evaluation, which does not keep routed experts, because it is not trained on."""
        return self.make(sampling.beside(self._recipe.rollouts.sampling), routes and routes.unkept())


def _build_scheduler(
    base: Foundation, restored: RestoredAttempt, *, sampler: Sampler, room: RoutedExpertsBudget | None
) -> Scheduler:
    config, state, found = base.recipe.rollouts, restored.state, restored.found
    return Scheduler(
        config=config,
        order=restored.order,
        sampler=sampler,
        account=StalenessAccount(
            groups_per_step=config.rollouts_per_step // config.group_size,
            max_off_policy_steps=config.max_off_policy_steps,
            ready_batches=config.ready_batches,
            step=state.step,
            waiting=len(state.finished),
        ),
        counters=state.counters,
        next_index=state.next_index,
        restart=restored.restart,
        finished=state.finished,
        parts={index: group.rollouts for index, group in found.parts.items()},
        turns=found.turns,
        journal=restored.ledger,
        room=room,
        failures=base.failures,
        teacher=base.teacher,
    )


def _build_evaluator(
    base: Foundation,
    samplers: _Samplers,
    updater: WeightUpdater,
    *,
    up_to: int,
    routes: RoutedExpertsSettings | None,
) -> Evaluator:
    run, recipe, environments = base.context.run, base.recipe, base.environments

    def held_out(sampling: EvaluationSampling) -> Sampler:
        return samplers.held_out(sampling, routes)

    return Evaluator(
        recipe=recipe,
        environments=environments,
        sampler=held_out(recipe.evaluation.sampling),
        updater=updater,
        events=base.events,
        done=evaluated_versions(run, up_to=up_to),
        sets=held_out_sets(run, recipe, environments, sampler_of=held_out, up_to=up_to),
    )
