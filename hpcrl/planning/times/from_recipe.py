"""From a recipe to the shapes that times are computed for, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.engine_shape import engine_gpus, engine_ranks_per_node, step_limits
from hpcrl.config.plan import Role
from hpcrl.config.recipe import EngineGroupConfig, Recipe
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.memory.settings import trained_parameters
from hpcrl.planning.times.handoff import HandoffPath
from hpcrl.planning.times.shapes import ComputeDtype, EngineShape, SparseKernels, TrainerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """Shapes of all roles.

    Attributes
    ----------
    trainer, decode, prefill:
        ``decode`` is also an engine that does both; ``prefill`` is None then.
    handoff_path, handoff_dtype, delta_chain:
        Path of weights from trainer to engines, their dtype, and number of deltas after a full version.
    router_replay:
        Rollouts carry the engines' choices of experts.
    shared_node:
        Trainer and engines share one node.
    shared_gpus:
        They have the same GPUs of it.
    """

    trainer: TrainerShape
    decode: EngineShape
    prefill: EngineShape | None
    handoff_path: HandoffPath = "filesystem"
    handoff_dtype: ComputeDtype = "bfloat16"
    delta_chain: int = 0
    router_replay: bool = False
    shared_node: bool = False
    shared_gpus: bool = False

    @property
    def nodes(self) -> int:
        """Return the number of nodes of all roles."""
        return self.trainer.nodes + (0 if self.shared_node else self.engine_nodes)

    @property
    def engine_nodes(self) -> int:
        """Return the number of nodes of all engines."""
        if self.shared_node:
            return 1
        return self.decode.all_nodes + (0 if self.prefill is None else self.prefill.all_nodes)

    def size(self, shape: TrainerShape | EngineShape) -> int:
        """Return the nodes of a role; where trainer and engines share one, its GPUs."""
        if isinstance(shape, EngineShape):
            return shape.all_ranks if self.shared_node else shape.all_nodes
        return shape.ranks if self.shared_node else shape.nodes

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all roles."""
        if self.shared_gpus:
            return self.trainer.ranks
        prefill = 0 if self.prefill is None else self.prefill.all_ranks
        return self.trainer.ranks + self.decode.all_ranks + prefill


def planned_layout(recipe: Recipe, cluster: SlurmCluster, facts: ModelFacts) -> PlannedLayout:
    """Return the shapes of a recipe on a cluster."""
    engine = recipe.engine
    prefill = None
    if engine.prefill is not None and engine.decode is not None:
        prefill = _engine_shape(recipe, cluster, facts, Role.PREFILL, engine.prefill)
        decode = _engine_shape(recipe, cluster, facts, Role.DECODE, engine.decode)
    else:
        whole = EngineGroupConfig(replicas=engine.replicas, nodes=engine.nodes)
        decode = _engine_shape(recipe, cluster, facts, Role.ENGINE, whole)
    return PlannedLayout(
        trainer=_trainer_shape(recipe, facts),
        decode=decode,
        prefill=prefill,
        handoff_path=_handoff_path(recipe),
        handoff_dtype="fp8" if recipe.handoff.kind == "fp8" else recipe.handoff.dtype or recipe.trainer.dtype,
        delta_chain=recipe.handoff.delta_chain,
        router_replay=recipe.returns_routed_experts,
        shared_node=engine.shares_node,
        # engines on processors leave GPUs to the trainer
        shared_gpus=engine.shares_gpus and engine_gpus(recipe, cluster, Role.ENGINE) > 0,
    )


def _handoff_path(recipe: Recipe) -> HandoffPath:
    if recipe.handoff.transport == "fabric":
        return "fabric"
    return "fan_out" if recipe.fans_out else "filesystem"


def _trainer_shape(recipe: Recipe, facts: ModelFacts) -> TrainerShape:
    trainer = recipe.trainer
    return TrainerShape(
        nodes=trainer.nodes,
        gpus_per_node=max(1, trainer.ranks // trainer.nodes),
        context_parallel=trainer.parallelism.cp,
        expert_parallel=trainer.parallelism.ep,
        copies=trainer.parallelism.dp_replicate,
        cp_scheme=trainer.parallelism.cp_scheme,
        compute_dtype="fp8" if trainer.precision.fp8 is not None else trainer.dtype,
        gather_dtype_bytes=2 if trainer.dtype == "bfloat16" else 4,
        recompute=trainer.memory.activation_checkpointing,
        recompute_every=trainer.memory.checkpoint_every_layers,
        head_twice=trainer.memory.lm_head_chunk_tokens is not None and recipe.algorithm.loss.is_of_rollouts,
        offload_optimizer=trainer.memory.optimizer_offload,
        offload_parameters=trainer.memory.parameter_offload,
        offload_activations=trainer.memory.activation_offload,
        reference=_reference(recipe),
        micro_batch_tokens=trainer.micro_batch_tokens,
        muon=trainer.optimizer.kind == "muon",
        sparse_kernels=_sparse_kernels(recipe),
        trained=None if trainer.lora is None else trained_parameters(facts, trainer.lora),
    )


def _sparse_kernels(recipe: Recipe) -> SparseKernels:
    """Return the kernels that a GPU gets; ``reference`` was not measured and is planned like these."""
    match recipe.trainer.kernels.sparse_attention:
        case "auto" | "reference":
            return "triton"
        case chosen:
            return chosen


def _reference(recipe: Recipe) -> Literal["device", "host"] | None:
    kl, trainer = recipe.algorithm.kl, recipe.trainer
    if kl is None:
        return None
    copied = trainer.lora is None
    return "host" if (copied and kl.on_host) or trainer.memory.parameter_offload else "device"


def _engine_shape(
    recipe: Recipe, cluster: SlurmCluster, facts: ModelFacts, role: Role, group: EngineGroupConfig
) -> EngineShape:
    engine = recipe.engine
    weights: ComputeDtype = "fp8" if engine.memory.weights == "fp8" else engine.dtype
    ranks = engine_ranks_per_node(recipe, cluster, role)
    return EngineShape(
        replicas=group.replicas,
        nodes=group.nodes,
        gpus_per_node=ranks,
        tensor_parallel=engine.tp,
        # vLLM distributes experts over all ranks of a replica
        expert_parallel=group.nodes * ranks if facts.num_experts else 1,
        weight_dtype=weights,
        kv_dtype="fp8" if engine.memory.kv_cache_dtype == "fp8" else engine.dtype,
        max_num_seqs=step_limits(engine, role).max_num_seqs,
    )


def with_layout(recipe: Recipe, layout: PlannedLayout) -> Recipe:
    """Return the recipe with the nodes and degrees of a layout; the rest stays."""
    shape = layout.trainer
    memory = recipe.trainer.memory.model_copy(
        update={
            "optimizer_offload": shape.offload_optimizer,
            "activation_offload": shape.offload_activations,
        }
    )
    trainer = recipe.trainer.model_copy(
        update={
            "nodes": shape.nodes,
            "ranks": shape.ranks,
            "parallelism": recipe.trainer.parallelism.model_copy(
                update={"ep": shape.expert_parallel, "cp": shape.context_parallel, "dp_replicate": shape.copies}
            ),
            "memory": memory,
        }
    )
    update: dict[str, Any] = {"replicas": layout.decode.replicas, "nodes": layout.decode.nodes}
    if layout.prefill is not None:
        sides = {"prefill": layout.prefill, "decode": layout.decode}
        # other settings of a side stay
        update = {
            name: (getattr(recipe.engine, name) or EngineGroupConfig(replicas=1, nodes=1)).model_copy(
                update={"replicas": side.replicas, "nodes": side.nodes}
            )
            for name, side in sides.items()
        }
    engine = recipe.engine.model_copy(update=update)
    return recipe.model_copy(update={"trainer": trainer, "engine": engine})
