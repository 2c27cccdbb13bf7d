"""Engines that keep the weights that they have started with, as version 0."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import aiohttp

from hpcrl.config.recipe import Recipe
from hpcrl.errors import DeadlineError
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines.client import EngineClient, EngineError
from hpcrl.rollouts.engines.disaggregated_pool import DisaggregatedPool
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.engines.replica_client import client_of
from hpcrl.rollouts.engines.routed_pool import make_pool
from hpcrl.rollouts.engines.router_client import RouterClient
from hpcrl.rollouts.sampling.routed_experts import answer_limits
from hpcrl.rollouts.supervised import Supervised
from hpcrl.rollouts.telemetry.deadlines import engines_lost_after_s
from hpcrl.runs.events import EventWriter
from hpcrl.runs.role import Member, RoleContext

START_VERSION = 0
"""Policy version of the start model."""
_LOOK_S = 0.5
_CALL_S = 30.0


def pool_of(context: RoleContext, recipe: Recipe, http: aiohttp.ClientSession, events: EventWriter) -> EnginePool:
    """Make the pool of all engines of an attempt."""
    endpoints, limits = context.endpoints(), answer_limits(recipe, None)

    def make_client(member: Member, role: str) -> EngineClient:
        name = f"{role}-{member.replica}"
        return client_of(http, name=name, url=member.url, servers=member.servers, limits=limits)

    supervised = Supervised(context)
    clients = {
        role: [make_client(member, role) for member in endpoints.fixed(role)]
        for role in ("engine", "prefill", "decode")
    }
    router = None
    if "router" in endpoints.urls:
        ours = recipe.engine.router.kind == "dynamo"
        router = RouterClient(
            http, name="router", url=endpoints.one("router"), hands_on_content_types=ours, limits=limits
        )
    sides = bool(clients["prefill"] or clients["decode"])
    return make_pool(
        [client for each in clients.values() for client in each],
        router,
        routed=partial(DisaggregatedPool, supervised=supervised) if sides else None,
        events=events,
        counters=Counters(),
        request_timeout_s=recipe.rollouts.request_timeout_s,
        max_retries=recipe.rollouts.max_retries,
        lost_after_s=engines_lost_after_s(context.run),
        on_unusable=supervised.restart_engine,
    )


async def label_engines(pool: EnginePool, *, timeout_s: float) -> None:
    """Check that engines serve version 0, and label those whose start sets no label.

    Runs until it is cancelled; engines that come back are found as well.

    Raises
    ------
    DeadlineError
        An engine is there for ``timeout_s`` and does not take the version.
    """
    refused: dict[str, float] = {}
    while True:
        for engine in [engine for engine in pool.engines if engine.version < 0]:
            problem = await _label(pool, engine)
            if not problem:
                refused.pop(engine.name, None)
            elif time.monotonic() > refused.setdefault(engine.name, time.monotonic()) + timeout_s:
                raise DeadlineError(f"{engine.name} does not say within {timeout_s:g} s that it is ready: {problem}")
        await asyncio.sleep(_LOOK_S)


async def _label(pool: EnginePool, engine: Engine) -> str:
    """Return why an engine that is there does not take its version; empty where it does, or is away."""
    incarnation, began_s = engine.incarnation, time.monotonic()
    if engine.away or await engine.client.problem(timeout_s=_CALL_S) is not None:
        return ""
    label = str(START_VERSION)
    try:
        if set(await engine.client.weight_labels(timeout_s=_CALL_S)) != {label}:
            await engine.client.control("/update_weight_version", {"new_version": label}, timeout_s=_CALL_S)
    except EngineError as error:
        return str(error)
    if engine.incarnation == incarnation:
        engine.serve(START_VERSION, proved_s=began_s)
        engine.end_exchange()
        await pool.notify()
    return ""
