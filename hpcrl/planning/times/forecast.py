"""The forecast of a plan: every time with its terms, the loop's steady state, what it costs, what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.models.adapting import published_adapters
from hpcrl.models.facts import ModelFacts
from hpcrl.models.tensors import DTYPE_BYTES, Part
from hpcrl.planning.calibration.calibration_file import Calibration
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.memory.settings import trained_parameters
from hpcrl.planning.routes import max_rollouts_in_flight
from hpcrl.planning.times.engine import decode_step
from hpcrl.planning.times.from_recipe import PlannedLayout
from hpcrl.planning.times.handoff import HANDOFF_PATHS, HandoffLoad, checkpoint_save, handoff, share_bytes, startup
from hpcrl.planning.times.loop import LoopEstimate, LoopInputs, steady_state
from hpcrl.planning.times.rates import Rates, StorageRates
from hpcrl.planning.times.serving import ServingFleet
from hpcrl.planning.times.shapes import EngineShape
from hpcrl.planning.times.terms import TimeTable
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from hpcrl.planning.times.work import tensor_counts
from hpcrl.planning.times.workload import Workload, resolve_workload

_STATE_BYTES = 12
"""Bytes a parameter in a checkpoint: float32 master weights and both moments of AdamW."""
_WAVES = 2.5
"""Steps of a group over batches that may wait, from which on steps come in waves: in simulations of the reference run
they are 20 % longer at 3, and 2 % at 2."""


@dataclass(frozen=True)
class Site:
    """The rates of a cluster by role."""

    cluster: SlurmCluster
    calibration: Calibration
    trainer: Rates
    decode: Rates
    prefill: Rates
    storage: StorageRates

    __hash__ = object.__hash__


def site_rates(cluster: SlurmCluster, calibration: Calibration) -> Site:
    """Return the rates of all roles."""
    by_role = {
        role: Rates(node_hardware(cluster, role), calibration) for role in (Role.TRAINER, Role.DECODE, Role.PREFILL)
    }
    return Site(
        cluster,
        calibration,
        by_role[Role.TRAINER],
        by_role[Role.DECODE],
        by_role[Role.PREFILL],
        StorageRates(cluster, calibration),
    )


@dataclass(frozen=True)
class Forecast:
    """Forecast of a plan.

    Attributes
    ----------
    facts, layout:
        The model, and shapes.
    tables:
        Terms by activity: ``trainer``, ``decode``, ``prefill``, ``handoff`` (and, for comparison, those of its
        alternatives among ``handoff_filesystem``, ``handoff_fan_out``, ``handoff_delta``), ``checkpoint``, ``startup``.
    loop:
        The steady state; None where a number is missing.
    workload:
        Shape of the rollouts.
    share_bytes:
        Bytes through the shared filesystem: ``written`` and ``read`` a step (checkpoints spread over their steps).
    prompt_busy_s:
        Seconds of a step in which the engines that compute prompts have work.
    missing:
        Numbers that the cluster profile lacks.
    assumptions, warnings:
        Texts in whole sentences.
    """

    facts: ModelFacts
    layout: PlannedLayout
    tables: Mapping[str, TimeTable]
    loop: LoopEstimate | None
    workload: Workload
    share_bytes: Mapping[str, float]
    prompt_busy_s: float = 0.0
    missing: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def step_s(self) -> float | None:
        """Return the seconds of a step."""
        return None if self.loop is None else self.loop.step_s

    @property
    def gpu_hours_per_step(self) -> float | None:
        """Return the GPU-hours that one step costs."""
        return None if self.loop is None else self.layout.gpus * self.loop.step_s / 3600.0

    @property
    def gpu_hours_per_day(self) -> float:
        """Return the GPU-hours of a day, used or not."""
        return self.layout.gpus * 24.0


@lru_cache(maxsize=32)
def _weight_bytes(facts: ModelFacts, dtype: str) -> tuple[float, float]:
    """Return the stored bytes of a model: all of them, and those of experts. ``fp8`` is block-scaled."""
    fp8 = dtype == "fp8"
    parts = facts.weight_bytes("bfloat16" if fp8 else dtype, fp8=fp8)
    return float(sum(parts.values())), float(parts.get(Part.EXPERT, 0))


def engine_tensors(facts: ModelFacts, shape: EngineShape) -> float:
    """Return the number of a published version's tensors that one GPU of an engine reads from."""
    outside, experts = tensor_counts(facts, fp8=shape.weight_dtype == "fp8")
    return outside + experts / shape.expert_parallel


def engine_bytes(facts: ModelFacts, shape: EngineShape) -> tuple[float, float]:
    """Return the weight bytes that one node of an engine needs, and one GPU."""
    total, experts = _weight_bytes(facts, shape.weight_dtype)
    dense = total - experts
    node = dense + experts * min(1.0, shape.gpus_per_node / shape.expert_parallel)
    gpu = dense / shape.tensor_parallel + experts / shape.expert_shards
    return node, gpu


def forecast(
    recipe: Recipe,
    facts: ModelFacts,
    layout: PlannedLayout,
    site: Site,
    *,
    workload: Workload | None = None,
    slots: float | None = None,
) -> Forecast:
    """Predict all times of a layout.

    Parameters
    ----------
    workload:
        Workload of the rollouts; None: of the calibration file.
    slots:
        Sequences that the KV cache of one data-parallel rank holds. None: as many as ``max_num_seqs``.
    """
    workload = workload or resolve_workload(recipe, site.calibration)
    batch = TrainerBatch(recipe.rollouts.rollouts_per_step, workload.lengths, layout.router_replay)
    trainer = trainer_step(facts, layout.trainer, batch, site.trainer)
    own = _handoff_of(recipe, facts, layout, site)
    weights = handoff(own, site.trainer, site.decode, site.storage)
    state = trained_parameters(facts, recipe.trainer.lora) * _STATE_BYTES
    save = checkpoint_save(state, layout.trainer.nodes, layout.trainer.ranks, site.trainer, site.storage)
    tables = {
        "trainer": trainer,
        "handoff": weights,
        **_other_paths(own, site),
        "checkpoint": save,
        "startup": _startup(facts, layout, site),
    }
    serving = ServingFleet(
        facts, workload, layout.decode, site.decode, layout.prefill, site.prefill if layout.prefill else None, slots
    )
    places = max_rollouts_in_flight(recipe, facts)
    loop, loop_missing = _loop(recipe, tables, serving, places, same_gpus=layout.shared_gpus)
    batch_size = float(layout.decode.max_num_seqs) if loop is None else loop.served.batch
    tables["decode"] = decode_step(
        facts, layout.decode, site.decode, batch=batch_size, context=workload.mean("context")
    )
    tables["prefill"] = serving.prompt_token
    prompt_s = serving.prompt_tokens * recipe.rollouts.rollouts_per_step / serving.prompt_rate if loop else 0.0
    missing = dict.fromkeys([*loop_missing, *(key for table in tables.values() for key in table.missing)])
    return Forecast(
        facts=facts,
        layout=layout,
        tables=tables,
        loop=loop,
        workload=workload,
        share_bytes=_share_bytes(recipe, facts, own),
        prompt_busy_s=prompt_s,
        missing=tuple(missing),
        assumptions=tuple(_workload_notes(workload)),
        warnings=_warnings(recipe, loop, workload),
    )


def _other_paths(own: HandoffLoad, site: Site) -> dict[str, TimeTable]:
    """Return the tables of the same version by other paths, for comparison."""
    ways = {f"handoff_{path}": replace(own, path=path) for path in HANDOFF_PATHS if path != own.path}
    if own.changed_share == 1.0:
        ways["handoff_delta"] = replace(own, changed_share=site.calibration.constant("delta_share"))
    return {name: handoff(way, site.trainer, site.decode, site.storage) for name, way in ways.items()}


def trainer_seconds(recipe: Recipe, tables: Mapping[str, TimeTable]) -> float | None:
    """Return the seconds in which a step occupies the trainer.

    These are its own work, the copy of the weights, and a part of a checkpoint's copy. With ``handoff.overlap`` a
    version is written during the next step, whose copy waits for it; without, the trainer waits. A checkpoint of mode
    ``sync`` stops the trainer until it is written.
    """
    weights, save = tables["handoff"], tables["checkpoint"]
    parts = [tables["trainer"].seconds, weights["handoff.copy_out"].value, save.seconds]
    written = [weights[f"handoff.{name}"].value for name in ("write", "commit")]
    stored = save["checkpoint.write"].value
    if any(value is None for value in (*parts, *written, stored)):
        return None
    own, copy, saved = (value or 0.0 for value in parts)
    write = sum(value or 0.0 for value in written)
    if recipe.checkpoint.mode == "sync":
        saved += stored or 0.0
    every = recipe.checkpoint.every_steps
    work = own + copy + (saved / every if every else 0.0)
    return max(work, write) if recipe.handoff.overlap else work + write


def _loop(
    recipe: Recipe,
    tables: Mapping[str, TimeTable],
    serving: ServingFleet,
    places: tuple[int, str],
    *,
    same_gpus: bool,
) -> tuple[LoopEstimate | None, tuple[str, ...]]:
    trainer_s, handoff_s = trainer_seconds(recipe, tables), tables["handoff"].seconds
    if trainer_s is None or handoff_s is None:
        return None, ()
    load_s = tables["handoff"]["handoff.load"].value or 0.0
    inputs = LoopInputs.of(
        recipe,
        serving,
        trainer_s=trainer_s,
        handoff_s=handoff_s,
        load_s=load_s,
        places=places,
        same_gpus=same_gpus,
    )
    try:
        return steady_state(inputs), ()
    except ConfigError as error:
        return None, tuple(finding.key for finding in error.findings)


def _published_bytes(facts: ModelFacts, recipe: Recipe, dtype: str) -> float:
    """Return the bytes of a version.

    Of the base of an adapter engines read the blocks that it changes, which may be nearly all.
    """
    lora = recipe.trainer.lora
    if lora is None:
        return _weight_bytes(facts, dtype)[0]
    return float(published_adapters(facts, lora.rank, lora.targets) * DTYPE_BYTES[dtype])


def _handoff_of(recipe: Recipe, facts: ModelFacts, layout: PlannedLayout, site: Site) -> HandoffLoad:
    # every engine reads the published version, and converts it to its own dtype
    dtype = layout.handoff_dtype
    sides = [replace(side, weight_dtype=dtype) for side in (layout.decode, layout.prefill) if side is not None]
    # replicas of one node share the bytes that are read
    needs = [(1 if layout.shared_node else side.all_nodes, *engine_bytes(facts, side)) for side in sides]
    nodes = sum(count for count, _, _ in needs)
    delta, chain = site.calibration.constant("delta_share"), layout.delta_chain
    if delta > recipe.handoff.delta_max_share:
        chain = 0
    return HandoffLoad(
        path=layout.handoff_path,
        bytes=_published_bytes(facts, recipe, dtype),
        # a full version, and its deltas
        changed_share=(1.0 + chain * delta) / (chain + 1),
        trainer_nodes=layout.trainer.nodes,
        trainer_gpus=layout.trainer.ranks,
        engine_nodes=nodes,
        node_bytes=sum(count * node for count, node, _ in needs) / nodes,
        gpu_bytes=max(gpu for _, _, gpu in needs),
        gpu_tensors=max(engine_tensors(facts, side) for side in sides),
        written_share=_written_share(recipe),
    )


def _written_share(recipe: Recipe) -> float:
    """Return the share of the versions that ``handoff.durable_every`` or a checkpoint writes."""
    every, saved = recipe.handoff.durable_every, recipe.checkpoint.every_steps
    return 1 / every + (1 / saved - 1 / math.lcm(every, saved) if saved else 0.0)


def _startup(facts: ModelFacts, layout: PlannedLayout, site: Site) -> TimeTable:
    sides = [side for side in (layout.decode, layout.prefill) if side is not None]
    return startup(
        trainer_bytes=float(facts.stored_bytes),
        nodes=layout.nodes,
        engine_bytes=sum(side.all_nodes * engine_bytes(facts, side)[0] for side in sides),
        rates=site.trainer,
        storage=site.storage,
    )


def _share_bytes(recipe: Recipe, facts: ModelFacts, own: HandoffLoad) -> dict[str, float]:
    written, read = share_bytes(own)
    every = recipe.checkpoint.every_steps
    save = trained_parameters(facts, recipe.trainer.lora) * _STATE_BYTES / every if every else 0.0
    return {"weights written": written, "weights read": read, "checkpoints written": save}


def _workload_notes(workload: Workload) -> list[str]:
    return [f"rollouts of {load.name}: {load.source}" for load in workload.environments]


def _warnings(recipe: Recipe, loop: LoopEstimate | None, workload: Workload) -> tuple[str, ...]:
    found = []
    if workload.assumed:
        names = ", ".join(workload.assumed)
        found.append(
            f"nothing is known about the rollouts of {names}: times are upper limits; measure a run and give "
            "--calibration (hpcrl plan calibrate RUN)"
        )
    if loop is not None:
        longest = loop.served.durations.largest_of(recipe.rollouts.group_size)
        rollouts = recipe.rollouts
        waves = longest > _WAVES * rollouts.ready_batches * loop.step_s
        if loop.bound == "trainer" and rollouts.max_off_policy_steps and waves:
            found.append(
                f"groups take {longest / loop.step_s:.1f} steps, and none starts while rollouts.ready_batches="
                f"{rollouts.ready_batches} wait: they come in waves, and steps are longer than this estimate; "
                "`hpcrl simulate` says by how much; raise rollouts.ready_batches if staleness may rise"
            )
        if loop.dropped > 0.02:
            found.append(
                f"{loop.dropped:.0%} of the rollouts outlive max_off_policy_steps "
                f"({recipe.rollouts.max_off_policy_steps}) and are thrown away: raise it, or shorten rollouts"
            )
        if recipe.engine.shares_gpus:
            return tuple(found)  # each side waits for the other, as it must
        if loop.engines_wait > 0.3:
            found.append(f"engines wait {loop.engines_wait:.0%} of a step for the trainer: fewer engines are enough")
        if loop.trainer_waits > 0.3:
            found.append(
                f"the trainer waits {loop.trainer_waits:.0%} of a step for rollouts: more engines, or a smaller trainer"
            )
    return tuple(found)
