"""Rollouts through a real router between real prefill and decode engines, asked for by the orchestrator's own pool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np
from engine_helpers import forward, publish, tensors_of
from msgspec.structs import replace
from numpy.typing import NDArray
from real_router import NeverRestarted
from vllm_fleet import Fleet

from hpcrl.config.plan import Role
from hpcrl.modeling.decoder import Decoder
from hpcrl.network.routed_experts_reference import PATH
from hpcrl.rollouts.engines.client import EngineClient, SamplingParams
from hpcrl.rollouts.engines.disaggregated_pool import DisaggregatedPool
from hpcrl.rollouts.engines.partial_generation import PartialGeneration
from hpcrl.rollouts.engines.router_client import RouterClient
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsRows, RoutedExpertsSettings
from hpcrl.runs.events import EventWriter
from hpcrl.weights import HandoffStore

NAME = "quickstart_vllm"
TURNS = 3


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(7, 103) for _ in range(length)]


def take(fleet: Fleet, version: int, model_dir: Path, model: Decoder) -> None:
    """Both sides serve these weights from now on."""
    path = publish(HandoffStore(fleet.run.weights_dir), version, model_dir, tensors_of(model)).path
    for side in (Role.PREFILL, Role.DECODE):
        engine = fleet.servers[side, 0]
        engine.ok("/init_weight_transfer_engine", {"init_info": {}})
        engine.ok("/start_weight_update", {})
        engine.ok("/pause?mode=keep&clear_cache=false")
        engine.ok("/update_weights", {"update_info": {"path": str(path)}})
        engine.ok("/finish_weight_update", {"weight_version": str(version)})
        engine.ok("/resume")


def follow_rollouts(
    fleet: Fleet,
    model: Decoder,
    opening: list[int],
    seeds: Sequence[int],
    store: KnownRows,
    *,
    interval: int | None = None,
) -> list[NDArray[np.bool_]]:
    """Rollouts of one prompt, one after the other, of `TURNS` turns each.

    Every row that is known is that of a plain forward pass.

    Parameters
    ----------
    interval:
        Tokens of a part of an answer; None: answers come whole.

    Returns
    -------
    list
        Which rows are known, of each rollout.
    """
    urls = {side.value: fleet.servers[side, 0].url for side in (Role.PREFILL, Role.DECODE, Role.ROUTER)}
    events = EventWriter(fleet.run, attempt=fleet.attempt, writer="test")

    fetched: list[str] = []

    async def note(_: object, __: object, params: aiohttp.TraceRequestEndParams) -> None:
        if params.url.path == PATH and params.response.status == 200:
            fetched.append(str(params.url.origin()))

    async def run() -> list[NDArray[np.bool_]]:
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(note)
        async with aiohttp.ClientSession(headers=fleet.headers, trace_configs=[trace]) as session:
            pool = DisaggregatedPool(
                [EngineClient(session, name=f"{side}-0", url=urls[side]) for side in ("prefill", "decode")],
                router=RouterClient(session, name="router", url=urls["router"]),
                supervised=NeverRestarted(),
                events=events,
                counters=store.counters,
                request_timeout_s=300.0,
                max_retries=0,
            )
            return [await _rollout(pool, model, opening, store, seed=seed, interval=interval) for seed in seeds]

    known = asyncio.run(run())
    # of each answer, or part of one, decode gives its rows itself
    assert fetched.count(urls["decode"]) >= len(seeds) * TURNS
    return known


async def _rollout(
    pool: DisaggregatedPool, model: Decoder, opening: list[int], store: KnownRows, *, seed: int, interval: int | None
) -> NDArray[np.bool_]:
    text, rows = opening, RoutedExpertsRows(RoutedExpertsSettings(layers=2, width=2, experts=8, gaps=True), store)
    for turn in range(TURNS):
        params = SamplingParams(
            temperature=1.0,
            max_tokens=12,
            seed=seed,
            stop_token_ids=[],
            routed_experts_prompt_start=rows.start(len(text)),
        )
        if interval is not None:
            params = replace(params, stream_interval=interval)
        generation = await pool._ask(pool.front, PartialGeneration(text, params), "1", "rows")
        text = [*text, *generation.token_ids.tolist()]
        assert generation.experts is not None
        rows.add(len(text) - 1, generation.experts, opening=None if turn else (1, opening))
        if turn < TURNS - 1:
            text += prompt_of(40, 100 * seed + turn)
    routes = rows.aligned(len(text))
    assert routes is not None
    known = np.asarray(routes.known, bool)
    assert (routes.experts[known] == forward(model, text)[1][known]).all()
    return known
