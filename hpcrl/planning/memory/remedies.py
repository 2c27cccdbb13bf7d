"""Settings that would make a recipe fit: each is changed alone and planned again, and those that help are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hpcrl.config.base import StrictModel
from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.engine_shape import engine_gpus, engine_side, replica_nodes, step_limits
from hpcrl.config.node_demands import demands
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.fit import MemoryReport, RoleMemory, memory_report
from hpcrl.planning.routes import max_rollouts_in_flight, rollout_routes_bytes

Changes = tuple[tuple[str, Any], ...]
"""Dotted keys of the recipe with new values."""

_MOST_NODES = 64
"""Maximum nodes of a role in the search of a fit."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A change that makes a place fit.

    Attributes
    ----------
    changes:
        As for ``--set``.
    price:
        Cost of the change.
    headroom:
        Bytes that are left then.
    """

    changes: Changes
    price: str
    headroom: int

    def __str__(self) -> str:
        settings = " ".join(f"--set {key}={_shown(value)}" for key, value in self.changes)
        return f"{settings} ({self.price}; {self.headroom / GIB:.1f} GiB free then)"


@dataclass(frozen=True, slots=True)
class Shortage:
    """A place that does not fit, and what would help; no knobs: nothing that hpcrl knows of does."""

    place: RoleMemory
    knobs: tuple[Knob, ...]

    @property
    def missing(self) -> int:
        """Return the bytes that are missing."""
        return -(self.place.headroom or 0)


def why_not(recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts) -> tuple[Shortage, ...]:
    """Return each place that is short, with the changes that would make it fit, cheapest first."""
    report = memory_report(recipe, cluster, facts)

    def plan(changed: Recipe) -> MemoryReport:
        return memory_report(changed, cluster, facts)

    return tuple(Shortage(place, _helpful(place, recipe, cluster, facts, plan)) for place in report.short)


def change(recipe: Recipe, changes: Changes) -> Recipe:
    """Return the recipe with dotted keys set (no rules are checked)."""
    for key, value in changes:
        recipe = _set(recipe, key.split("."), value)
    return recipe


def _set(model: Any, keys: list[str], value: Any) -> Any:
    if len(keys) > 1:
        value = _set(getattr(model, keys[0]), keys[1:], value)
    assert isinstance(model, StrictModel)
    return model.model_copy(update={keys[0]: value})


def _helpful(
    place: RoleMemory,
    recipe: Recipe,
    cluster: ClusterProfile,
    facts: ModelFacts,
    plan: Callable[[Recipe], MemoryReport],
) -> tuple[Knob, ...]:
    short = {(p.role, p.kind): p.headroom or 0 for p in plan(recipe).short}

    def headroom(changes: Changes) -> int | None:
        """Return the free bytes at this place; None where another place is short then, or shorter than it was."""
        report = plan(change(recipe, changes))
        others = [other for other in report.short if (other.role, other.kind) != (place.role, place.kind)]
        if any((other.headroom or 0) < short.get((other.role, other.kind), 0) for other in others):
            return None
        return report.place(place.role, place.kind).headroom

    knobs: list[Knob] = []
    together: dict[str, Any] = {}
    helped: set[tuple[str, ...]] = set()
    for changes, price in _candidates(place, recipe, cluster, facts):
        keys = tuple(key for key, _ in changes)
        if keys in helped:
            continue
        left = headroom(changes)
        if left is not None and left >= 0:
            # only the smallest helpful change of each kind
            helped.add(keys)
            knobs.append(Knob(changes, price, left))
        elif not knobs and not keys[0].endswith(".nodes"):
            together.update(changes)
    if not knobs and len(together) > 1:
        left = headroom(tuple(together.items()))
        if left is not None and left >= 0:
            knobs.append(Knob(tuple(together.items()), "all that saves memory, together", left))
    return tuple(knobs)


def _candidates(
    place: RoleMemory, recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts
) -> Iterator[tuple[Changes, str]]:
    """Yield changes that may help at a place, cheapest first."""
    if place.role is Role.TRAINER:
        yield from (_trainer_gpu if place.kind == "gpu" else _trainer_host)(recipe, cluster, facts)
        if place.kind == "host" and recipe.engine.shares_node:
            yield from _engine_host(recipe)
    elif place.role is Role.ORCHESTRATOR:
        yield from _fewer_rollouts(recipe, facts)
    elif place.role is Role.ENV:
        yield from _worker_host(recipe)
    elif place.kind == "gpu":
        yield from _engine_gpu(place.role, recipe, cluster)
    else:
        yield from _engine_host(recipe)


def _worker_host(recipe: Recipe) -> Iterator[tuple[Changes, str]]:
    workers = recipe.environment_workers
    assert workers is not None
    for factor in (2, 4, 8):
        yield (("environment_workers.count", workers.count * factor),), "more workers, and nodes for them"


def _trainer_gpu(recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts) -> Iterator[tuple[Changes, str]]:
    trainer, memory, parallel = recipe.trainer, recipe.trainer.memory, recipe.trainer.parallelism
    if memory.lm_head_chunk_tokens is None:
        yield (
            (("trainer.memory.lm_head_chunk_tokens", "auto"),),
            "logits are computed twice" if recipe.algorithm.loss.is_of_rollouts else "smaller products of matrices",
        )
    if trainer.micro_batch_tokens > recipe.engine.max_model_len:
        yield (("trainer.micro_batch_tokens", recipe.engine.max_model_len),), "more and smaller passes"
    if memory.activation_checkpointing != "full":
        full = ("trainer.memory.activation_checkpointing", "full")
        yield (full,), "about a third more arithmetic in a step"
        yield (full, ("trainer.memory.activation_offload", True)), "the same, and traffic over PCIe"
    elif not memory.activation_offload:
        yield (("trainer.memory.activation_offload", True),), "traffic over PCIe"
    if not memory.optimizer_offload:
        yield (("trainer.memory.optimizer_offload", True),), "a slower optimizer step, host memory"
    if not memory.parameter_offload:
        once = (("trainer.memory.optimizer_offload", False),) if memory.optimizer_offload else ()
        yield (*once, ("trainer.memory.parameter_offload", True)), "weights come over PCIe in each pass, host memory"
    if recipe.engine.shares_gpus:
        yield from _smaller_share(recipe)
    for degree in (2, 4, 8, 16):
        cp = parallel.cp * degree
        if trainer.ranks % cp == 0 and cp <= 32:
            yield (("trainer.parallelism.cp", cp),), "more communication in attention, fewer sequences at a time"
    for ep in (2, 4, 8):
        if ep > parallel.ep and trainer.ranks % ep == 0 and facts.num_experts and facts.num_experts % ep == 0:
            yield (("trainer.parallelism.ep", ep),), "tokens travel to their experts"
    yield from _more_trainer_nodes(recipe, cluster)


def _smaller_share(recipe: Recipe) -> Iterator[tuple[Changes, str]]:
    """Yield smaller shares of the GPUs for engines, the largest first."""
    now = recipe.engine.memory.gpu_memory_utilization
    for part in (0.6, 0.5, 0.4, 0.3, 0.2):
        if part < now:
            yield (("engine.memory.gpu_memory_utilization", part),), "the engine may use less of the GPU"


def _more_trainer_nodes(recipe: Recipe, cluster: ClusterProfile) -> Iterator[tuple[Changes, str]]:
    trainer = recipe.trainer
    if not isinstance(cluster, SlurmCluster) or recipe.engine.shares_node:
        return
    per_node = trainer.ranks // trainer.nodes
    parallel = trainer.parallelism
    partition = cluster.partition_name("trainer")
    free = cluster.partitions[partition].nodes - sum(
        demand.replicas * demand.nodes for demand in demands(recipe, cluster) if demand.partition == partition
    )
    for nodes in range(trainer.nodes + 1, _MOST_NODES + 1):
        ranks, more = nodes * per_node, nodes - trainer.nodes
        if all(ranks % (parallel.dp_replicate * degree) == 0 for degree in (parallel.ep, parallel.cp)):
            changes: Changes = (("trainer.nodes", nodes), ("trainer.ranks", ranks))
            where = "" if more <= free else f"; partition {partition} has {max(0, free)} left"
            yield changes, f"{_more_nodes(more)}{where}"


def _more_nodes(count: int) -> str:
    return f"{count} more {'node' if count == 1 else 'nodes'}"


def _trainer_host(recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts) -> Iterator[tuple[Changes, str]]:
    memory = recipe.trainer.memory
    if recipe.handoff.delta_chain:
        yield (("handoff.delta_chain", 0),), "full versions only"
    if recipe.handoff.transport == "fabric":
        yield (("handoff.transport", "share"),), "engines read versions from the shared filesystem"
    if recipe.checkpoint.mode == "async":
        yield (("checkpoint.mode", "sync"),), "the trainer waits until a checkpoint is written"
    # an orchestrator on a node of its own has the rollouts there
    if not isinstance(cluster, SlurmCluster) or not cluster.orchestrator_apart:
        yield from _fewer_rollouts(recipe, facts)
    if memory.activation_offload:
        yield (("trainer.memory.activation_offload", False),), "more memory of the GPUs"
    if memory.optimizer_offload:
        yield (("trainer.memory.optimizer_offload", False),), "more memory of the GPUs"
    yield from _more_trainer_nodes(recipe, cluster)


def _fewer_rollouts(recipe: Recipe, facts: ModelFacts) -> Iterator[tuple[Changes, str]]:
    if recipe.returns_routed_experts and (one := rollout_routes_bytes(recipe, facts)):
        now = max_rollouts_in_flight(recipe, facts)[0]
        for flying in (3 * now // 4, now // 2, now // 4):
            if flying >= recipe.rollouts.rollouts_per_step:
                limit = float(math.ceil(flying * one / GIB))
                yield (("rollouts.routes_in_flight_gib", limit),), f"at most {flying:,} rollouts at once"
    half = max(recipe.rollouts.rollouts_per_step, recipe.rollouts.max_in_flight // 2)
    if half < recipe.rollouts.max_in_flight:
        yield (("rollouts.max_in_flight", half),), "fewer rollouts at once"


def _engine_gpu(role: Role, recipe: Recipe, cluster: ClusterProfile) -> Iterator[tuple[Changes, str]]:
    engine, memory = recipe.engine, recipe.engine.memory
    sequences, tokens = step_limits(engine, role)
    if role is Role.DECODE and tokens > sequences:
        # DeepEP's low-latency buffers are as large as the largest step, and a decode engine takes a token a sequence
        yield (("engine.decode.max_num_batched_tokens", sequences),), "prompts it has to compute again take more steps"
    if engine.shares_gpus:
        yield from _other_cache(recipe)
    elif memory.gpu_memory_utilization < 0.9:
        yield (("engine.memory.gpu_memory_utilization", 0.9),), "less room for what vLLM does not count"
    if memory.kv_cache_dtype != "fp8":
        yield (("engine.memory.kv_cache_dtype", "fp8"),), "a little accuracy"
    if memory.weights != "fp8":
        yield (("engine.memory.weights", "fp8"),), "a little accuracy; the trainer should compute in FP8 too"
    ranks = replica_nodes(recipe)[role] * engine_gpus(recipe, cluster, role)
    for tp in (2, 4, 8):
        if tp > engine.tp and ranks % tp == 0:
            yield (("engine.tp", tp),), "communication in every layer, fewer data-parallel ranks"
    side = engine_side(engine, role)
    key = "engine" if side is None else f"engine.{role.value}"
    nodes = engine.nodes if side is None else side.nodes
    if isinstance(cluster, SlurmCluster) and not recipe.engine.shares_node:
        limit = cluster.partitions[cluster.partition_name(role.value)].nodes
        for more in (nodes * 2, nodes * 4, nodes * 8):
            if more <= limit:
                yield ((f"{key}.nodes", more),), f"{_more_nodes(more - nodes)} a replica"
    if engine.max_model_len > 2048:
        yield (("engine.max_model_len", engine.max_model_len // 2),), "shorter rollouts"


def _other_cache(recipe: Recipe) -> Iterator[tuple[Changes, str]]:
    """Yield other sizes of the KV cache and of the engine's share, on GPUs that are the trainer's too."""
    now, share = recipe.engine.kv_cache_gib, recipe.engine.memory.gpu_memory_utilization
    for factor in (0.5, 0.25, 2, 4, 8, 16):
        yield (("engine.kv_cache_gib", now * factor),), "fewer sequences at once" if factor < 1 else "more memory"
    for part in (0.2, 0.3, 0.4, 0.5, 0.6):
        if part > share:
            yield (("engine.memory.gpu_memory_utilization", part),), "the trainer may use less of the GPU"


def _engine_host(recipe: Recipe) -> Iterator[tuple[Changes, str]]:
    store, offload = recipe.engine.kv_store, recipe.engine.memory.kv_offload_gib
    for part in (0.75, 0.5, 0.25):
        if store is not None:
            yield (("engine.kv_store.segment_gib", store.segment_gib * part),), "fewer prefixes are found again"
        if offload:
            yield (("engine.memory.kv_offload_gib", offload * part),), "fewer prefixes are found again"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
