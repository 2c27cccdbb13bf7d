"""Memory as the search asks it: does a trainer or an engine of this shape fit, and how many sequences does it hold."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.hardware import NodeHardware, node_hardware
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.engine import engine_ledger, kv_bytes_of_rank, kv_capacity
from hpcrl.planning.memory.fit import HOST_RESERVE, RoleMemory, engine_host_place, engine_memory, trainer_memory
from hpcrl.planning.memory.host import trainer_host
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.memory.trainer import trainer_fits, trainer_peak
from hpcrl.planning.search.splits import Fit, Fits
from hpcrl.planning.times.from_recipe import PlannedLayout
from hpcrl.planning.times.shapes import EngineShape, TrainerShape


def memory_fits(
    recipe: Recipe, cluster: SlurmCluster, facts: ModelFacts, layout: PlannedLayout, *, mean_tokens: float
) -> Fits:
    """Return the function that compares shapes with memory by `hpcrl.planning.memory.fit`, otherwise as in the recipe.

    Parameters
    ----------
    layout:
        The recipe's own layout, of which only one role is changed at a time.
    mean_tokens:
        Tokens of a rollout: the sequences that fit into a KV cache are counted with it, not with the longest one.
    """

    own, trainers = trainer_memory(recipe, device="cuda"), node_hardware(cluster, Role.TRAINER)

    def trainer(shape: TrainerShape) -> bool:
        memory = _of_shape(own, shape)
        if not trainer_fits(facts, memory, trainers.gpu_bytes):
            return False
        return _trainer_host(facts, memory, recipe, trainers, shape).ok

    def engine(shape: EngineShape, prompts: bool) -> Fit:
        role = Role.PREFILL if prompts else Role.ENGINE if layout.prefill is None else Role.DECODE
        node = node_hardware(cluster, role)
        memory = engine_memory(recipe.engine, ranks=shape.ranks, nodes=shape.nodes, role=role)
        ledger = engine_ledger(facts, memory)
        kv = kv_capacity(facts, memory, node.gpu_bytes)
        budget = round(node.gpu_bytes * memory.gpu_memory_utilization)
        one = kv_bytes_of_rank(facts, memory, memory.max_model_len)
        if ledger.total + one > budget:
            lacking = (ledger.total + one - budget) / GIB
            largest = ledger.largest
            return Fit(
                False,
                f"{role.value} gpu: {lacking:.1f} GiB short; largest: {largest.name} {largest.value / GIB:.1f} GiB",
            )
        fit = _fit(engine_host_place(facts, recipe, node, role=role, memory=memory, ledger=ledger))
        slots = min(float(shape.max_num_seqs), kv.tokens / mean_tokens)
        return Fit(fit.ok, fit.short, max(1.0, slots))

    return Fits(trainer, engine)


def trainer_fit(recipe: Recipe, cluster: SlurmCluster, facts: ModelFacts, shape: TrainerShape) -> Fit:
    """Return whether a recipe's trainer of one shape fits into memory, with a text where it does not fit."""
    node = node_hardware(cluster, Role.TRAINER)
    memory = _of_shape(trainer_memory(recipe, device="cuda"), shape)
    gpu = RoleMemory(Role.TRAINER, "gpu", trainer_peak(facts, memory), node.gpu_bytes)
    return _fit(gpu, _trainer_host(facts, memory, recipe, node, shape))


def _of_shape(own: TrainerMemory, shape: TrainerShape) -> TrainerMemory:
    """Return the memory of a recipe's trainer in another shape (`hpcrl.planning.times.from_recipe.with_layout`)."""
    return replace(
        own,
        ranks=shape.ranks,
        ep=shape.expert_parallel,
        cp=shape.context_parallel,
        dp_replicate=shape.copies,
        optimizer_offload=shape.offload_optimizer,
        activation_offload=shape.offload_activations,
    )


def _trainer_host(
    facts: ModelFacts, memory: TrainerMemory, recipe: Recipe, node: NodeHardware, shape: TrainerShape
) -> RoleMemory:
    orchestrator = not node.cluster.orchestrator_apart
    host = trainer_host(facts, memory, recipe, ranks_per_node=shape.gpus_per_node, orchestrator=orchestrator)
    return RoleMemory(Role.TRAINER, "host", host, round(node.host_bytes * (1 - HOST_RESERVE)))


def _fit(*places: RoleMemory) -> Fit:
    short = [place.summary() for place in places if not place.ok]
    return Fit(not short, "; ".join(short))
