"""Memory as the search asks it: does a trainer or an engine of this shape fit, and how many sequences does it hold."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.engine import engine_ledger, kv_bytes_of_rank, kv_capacity
from hpcrl.planning.memory.fit import HOST_RESERVE, Place, engine_host_place, engine_memory, trainer_memory
from hpcrl.planning.memory.host import trainer_host
from hpcrl.planning.memory.trainer import trainer_peak
from hpcrl.planning.search.splits import Fit, Fits
from hpcrl.planning.times.from_recipe import PlannedLayout, with_layout
from hpcrl.planning.times.shapes import EngineShape, TrainerShape

__all__ = ["memory_fits"]


def memory_fits(
    recipe: Recipe, cluster: SlurmCluster, facts: ModelFacts, layout: PlannedLayout, *, mean_tokens: float
) -> Fits:
    """What `hpcrl.planning.memory.fit` says of shapes, everything else as in the recipe.

    Parameters
    ----------
    layout:
        The recipe's own; of it only one role is changed at a time.
    mean_tokens:
        Tokens of a rollout: how many sequences a KV cache holds is counted with it, not with the longest one.
    """

    def trainer(shape: TrainerShape) -> Fit:
        changed = with_layout(recipe, replace(layout, trainer=shape))
        node = node_hardware(cluster, Role.TRAINER)
        memory = trainer_memory(changed, device="cuda")
        gpu = Place(Role.TRAINER, "gpu", trainer_peak(facts, memory), node.gpu_bytes)
        host = trainer_host(facts, memory, changed, ranks_per_node=shape.gpus_per_node)
        return _fit(gpu, Place(Role.TRAINER, "host", host, round(node.host_bytes * (1 - HOST_RESERVE))))

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


def _fit(*places: Place) -> Fit:
    short = [place.summary() for place in places if not place.ok]
    return Fit(not short, "; ".join(short))
