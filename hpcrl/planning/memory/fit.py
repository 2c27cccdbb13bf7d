"""Check whether a recipe fits a cluster: memory of each GPU and each host by role, and head-room.

Pure: `memory_report` turns recipe, profile and facts into numbers. `hpcrl.planning.memory.remedies` finds settings that
would make a recipe fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hpcrl.config.cluster import ClusterProfile, LocalCluster, SlurmCluster
from hpcrl.config.engine_shape import engine_gpus, replica_nodes, step_limits
from hpcrl.config.plan import Role
from hpcrl.config.recipe import EngineConfig, Recipe
from hpcrl.config.sandbox_use import sandbox_node
from hpcrl.jobplan.commands.vllm import LOW_LATENCY, all2all_backend
from hpcrl.models.facts import ModelFacts
from hpcrl.models.tensors import DTYPE_BYTES
from hpcrl.planning.hardware import NodeHardware, node_hardware
from hpcrl.planning.ledger import GIB, Ledger, Term
from hpcrl.planning.memory.engine import EngineMemory, KvCapacity, engine_ledger, kv_bytes_of_rank, kv_capacity
from hpcrl.planning.memory.host import engine_host, environment_terms, orchestrator_terms, pool_terms, trainer_host
from hpcrl.planning.memory.sandbox_memory import SandboxMemory, open_sandboxes
from hpcrl.planning.memory.settings import AUTO_CHUNK, AUTO_CHUNK_OF_ROLLOUTS, RealPass, TrainerMemory
from hpcrl.planning.memory.trainer import trainer_moments, trainer_peak

HOST_RESERVE = 0.05
"""Share of a node's memory for the system, file handles, the site's daemons."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """One kind of memory of one role.

    Attributes
    ----------
    role, kind:
        For example the trainer's ``gpu``. ``kind`` is ``host`` for a whole node.
    ledger:
        The moment that binds.
    capacity:
        Bytes that there are; None: the profile does not say, and nothing is compared.
    kv:
        KV cache of an engine's GPU; it takes what the ledger leaves, unless the ledger has it.
    moments:
        All moments, where there are several.
    """

    role: Role
    kind: Literal["gpu", "host"]
    ledger: Ledger
    capacity: int | None
    kv: KvCapacity | None = None
    moments: tuple[Ledger, ...] = ()

    @property
    def kv_takes_rest(self) -> bool:
        """Return whether free memory is KV cache."""
        return self.kv is not None and all(term.name != "KV cache" for term in self.ledger)

    @property
    def needed(self) -> int:
        """Return the required bytes; of a KV cache those of one sequence of full length."""
        return self.ledger.total

    @property
    def headroom(self) -> int | None:
        """Return the free bytes (negative: missing ones); None: not known."""
        return None if self.capacity is None else self.capacity - self.needed

    @property
    def ok(self) -> bool:
        """Return whether it fits, as far as is known."""
        return self.headroom is None or self.headroom >= 0

    def summary(self) -> str:
        """Return a summary in one line for people."""
        largest = self.ledger.largest
        head = f"{self.role.value} {self.kind}: {self.needed / GIB:.1f} GiB at {self.ledger.name}"
        binding = f"largest: {largest.name} {largest.value / GIB:.1f} GiB"
        if self.headroom is None or self.capacity is None:
            return f"{head}; {binding}"
        word = "free" if self.ok else "short"
        return f"{head} of {self.capacity / GIB:.1f} GiB, {abs(self.headroom) / GIB:.1f} GiB {word}; {binding}"


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All places of a run.

    Attributes
    ----------
    places:
        Memory of each role.
    sandboxes:
        Sandboxes of the fullest node, whose limits are in no place; None for a run without them.
    """

    places: tuple[RoleMemory, ...]
    sandboxes: SandboxMemory | None = None

    @property
    def ok(self) -> bool:
        """Return whether every place fits."""
        return all(place.ok for place in self.places)

    @property
    def short(self) -> tuple[RoleMemory, ...]:
        """Return the places that do not fit."""
        return tuple(place for place in self.places if not place.ok)

    def place(self, role: Role, kind: str) -> RoleMemory:
        """Return the place of a role (KeyError where there is none)."""
        for place in self.places:
            if (place.role, place.kind) == (role, kind):
                return place
        raise KeyError((role, kind))


def memory_report(
    recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts, real: RealPass | None = None
) -> MemoryReport:
    """Return the memory of every role of a recipe on a cluster.

    Parameters
    ----------
    real:
        Activations of the trainer's model (`hpcrl.planning.memory.real_model`); None: by formulas.

    Raises
    ------
    ConfigError
        The profile lacks a number that this needs; it is named.
    """
    if isinstance(cluster, LocalCluster):
        return _with_sandboxes(recipe, cluster, facts, (_local(recipe, cluster, facts, real),))
    if recipe.sft is not None:
        return MemoryReport(_trainer_places(recipe, cluster, facts, real))
    places = (*_trainer_places(recipe, cluster, facts, real), *_engine_places(recipe, cluster, facts))
    if recipe.engine.shares_node:
        places = _one_host(places, recipe.engine.replicas)
    places = (*places, *_orchestrator_places(recipe, cluster, facts), *_worker_places(recipe, cluster))
    return _with_sandboxes(recipe, cluster, facts, places)


def _with_sandboxes(
    recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts, places: tuple[RoleMemory, ...]
) -> MemoryReport:
    """Return the report of places, with the sandboxes that share one of them."""
    node = sandbox_node(recipe, cluster)
    # the engines of an evaluation may be of two roles, and no role has all nodes
    left = next((place.headroom for place in places if (place.role, place.kind) == (node.role, "host")), None)
    return MemoryReport(places, open_sandboxes(recipe, cluster, facts, left))


def _orchestrator_places(recipe: Recipe, cluster: SlurmCluster, facts: ModelFacts) -> list[RoleMemory]:
    """Return the host memory of the orchestrator's node, where it has one of its own."""
    if not cluster.orchestrator_apart:
        return []
    capacity = round(node_hardware(cluster, Role.ORCHESTRATOR).host_bytes * (1 - HOST_RESERVE))
    ledger = Ledger.of("rollouts", orchestrator_terms(facts, recipe, apart=True))
    return [RoleMemory(Role.ORCHESTRATOR, "host", ledger, capacity)]


def _worker_places(recipe: Recipe, cluster: SlurmCluster) -> list[RoleMemory]:
    """Return the host memory of a node of workers of environments: the part of it that a job asks for."""
    workers = recipe.environment_workers
    if workers is None or not workers.apart:
        return []
    capacity = round(node_hardware(cluster, Role.ENV).host_bytes * (1 - HOST_RESERVE))
    if workers.memory_gib is not None:
        capacity = min(capacity, round(workers.memory_gib * workers.per_node * GIB))
    ledger = Ledger.of("environments", environment_terms(recipe, workers.per_node))
    return [RoleMemory(Role.ENV, "host", ledger, capacity)]


def _one_host(places: tuple[RoleMemory, ...], replicas: int) -> tuple[RoleMemory, ...]:
    """Return the places of a node that trainer and engines share, with one host that holds the parts of all."""
    trainer, engine = (place for place in places if place.kind == "host")
    of_engines = (
        replace(term, name=f"engines: {term.name}", value=term.value * replicas, formula=f"({term.formula}) · replicas")
        for term in engine.ledger.terms
    )
    host = Ledger.of("training and serving", (*trainer.ledger.terms, *of_engines))
    return (*(place for place in places if place.kind == "gpu"), replace(trainer, ledger=host))


# -- trainer ----------------------------------------------------------------------------------------------------


def trainer_memory(recipe: Recipe, *, device: Literal["cpu", "cuda"]) -> TrainerMemory:
    """Describe the trainer of a recipe, in its terms of memory."""
    trainer = recipe.trainer
    saving = trainer.memory
    budget = trainer.micro_batch_tokens
    auto = AUTO_CHUNK_OF_ROLLOUTS if recipe.algorithm.loss.is_of_rollouts else AUTO_CHUNK
    return TrainerMemory(
        ranks=trainer.ranks,
        ep=trainer.parallelism.ep,
        cp=trainer.parallelism.cp,
        dp_replicate=trainer.parallelism.dp_replicate,
        cp_scheme=trainer.parallelism.cp_scheme,
        dtype=trainer.dtype,
        micro_batch_tokens=budget,
        activation_checkpointing=saving.activation_checkpointing,
        checkpoint_every_layers=saving.checkpoint_every_layers,
        activation_offload=saving.activation_offload,
        offload_in_flight_bytes=round(saving.offload_in_flight_gib * GIB),
        optimizer_offload=saving.optimizer_offload,
        parameter_offload=saving.parameter_offload,
        lm_head_chunk_tokens=auto if saving.lm_head_chunk_tokens == "auto" else saving.lm_head_chunk_tokens,
        loss_of_rollouts=recipe.algorithm.loss.is_of_rollouts,
        fp8=recipe.trainer.precision.fp8 is not None,
        lora=trainer.lora,
        router_replay=recipe.returns_routed_experts,
        handoff_dtype="fp8" if recipe.handoff.kind == "fp8" else recipe.handoff.dtype,
        # a delta is made against an image that is kept
        images=2 if recipe.handoff.delta_chain else 1,
        staging_bytes=_staging_bytes(recipe),
        saves_aside=recipe.checkpoint.mode == "async",
        reference=recipe.algorithm.kl is not None and trainer.lora is None,
        reference_on_host=recipe.algorithm.kl is not None and (recipe.algorithm.kl.on_host or saving.parameter_offload),
        reference_saved=recipe.algorithm.kl is not None and recipe.algorithm.kl.reference_every_steps is not None,
        muon=trainer.optimizer.kind == "muon",
        deepep_tokens=trainer.dispatched_tokens if trainer.parallelism.dispatcher == "deepep" else 0,
        deterministic=trainer.deterministic,
        device=device,
    )


def _staging_bytes(recipe: Recipe) -> int | None:
    handoff = recipe.handoff
    return None if handoff.overlap or handoff.delta_chain else round(handoff.staging_gib * GIB)


def _trainer_places(
    recipe: Recipe, cluster: SlurmCluster, facts: ModelFacts, real: RealPass | None
) -> tuple[RoleMemory, ...]:
    node = node_hardware(cluster, Role.TRAINER)
    memory = replace(trainer_memory(recipe, device="cuda" if node.gpus else "cpu"), real=real)
    per_node = recipe.trainer.ranks // recipe.trainer.nodes
    orchestrator = not cluster.orchestrator_apart
    host = trainer_host(facts, memory, recipe, ranks_per_node=per_node, orchestrator=orchestrator)
    available = round(node.host_bytes * (1 - HOST_RESERVE))
    if not node.gpus:
        peak = trainer_peak(facts, memory)
        own = Term("trainer ranks", peak.total * per_node, "peak · ranks", {"peak": peak.total, "ranks": per_node})
        return (RoleMemory(Role.TRAINER, "host", Ledger.of(peak.name, (own, *host.terms)), available),)
    moments = trainer_moments(facts, memory)
    peak = max(moments, key=lambda ledger: ledger.total)
    mine = node.gpu_bytes
    if recipe.engine.shares_gpus and recipe.sft is None:
        mine -= round(node.gpu_bytes * recipe.engine.memory.gpu_memory_utilization)
    gpu = RoleMemory(Role.TRAINER, "gpu", peak, mine, moments=moments)
    return gpu, RoleMemory(Role.TRAINER, "host", host, available)


# -- engines ----------------------------------------------------------------------------------------------------


def engine_memory(engine: EngineConfig, *, ranks: int, nodes: int, role: Role) -> EngineMemory:
    """Return the memory inputs of a replica of ``ranks`` GPUs on ``nodes`` nodes."""
    saving, limits = engine.memory, step_limits(engine, role)
    return EngineMemory(
        ranks=ranks,
        nodes=nodes,
        tp=engine.tp,
        dtype=engine.dtype,
        fp8_weights=saving.weights == "fp8",
        kv_dtype="fp8" if saving.kv_cache_dtype == "fp8" else engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        gpu_memory_utilization=saving.gpu_memory_utilization,
        kv_cache_bytes=round(engine.kv_cache_gib * GIB) if engine.shares_gpus else None,
        prompts_only=role is Role.PREFILL,
        low_latency=all2all_backend(role) == LOW_LATENCY,
    )


def _engine_places(recipe: Recipe, cluster: SlurmCluster, facts: ModelFacts) -> list[RoleMemory]:
    engine = recipe.engine
    places: list[RoleMemory] = []
    for role, nodes in replica_nodes(recipe).items():
        node = node_hardware(cluster, role)
        gpus = engine_gpus(recipe, cluster, role)
        if not gpus:
            ledger = _embedded(recipe, facts)
            places.append(RoleMemory(role, "host", ledger, round(node.host_bytes * (1 - HOST_RESERVE))))
            continue
        memory = engine_memory(engine, ranks=nodes * gpus, nodes=nodes, role=role)
        ledger = engine_ledger(facts, memory)
        length, token = memory.max_model_len, kv_bytes_of_rank(facts, memory)
        one = kv_bytes_of_rank(facts, memory, length)
        sequence = Term(
            "KV of one sequence",
            one + facts.state_bytes_per_sequence(memory.kv_dtype) // memory.tp,
            "max_model_len · KV of a token" if token * length == one else "Σ min(max_model_len, limit) · KV of a token",
            {"max_model_len": length, "KV of a token": token},
        )
        budget = round(node.gpu_bytes * memory.gpu_memory_utilization)
        cache = memory.kv_cache_bytes
        if cache is not None and cache < sequence.value:
            # vLLM refuses a cache without room for one sequence, whatever else is free
            budget = min(budget, ledger.total + cache)
        elif cache is not None:
            sequence = Term("KV cache", cache, "engine.kv_cache_gib")
        held = Ledger.of(ledger.name, (*ledger.terms, sequence))
        places.append(RoleMemory(role, "gpu", held, budget, kv_capacity(facts, memory, node.gpu_bytes)))
        places.append(engine_host_place(facts, recipe, node, role=role, memory=memory, ledger=ledger))
    return places


def engine_host_place(
    facts: ModelFacts, recipe: Recipe, node: NodeHardware, *, role: Role, memory: EngineMemory, ledger: Ledger
) -> RoleMemory:
    """Return the host memory of a node of an engine; ``ledger`` is that of one of its GPUs."""
    weights = ledger["other weights"].value + (ledger["expert weights"].value if facts.moe_layers else 0)
    here = memory.ranks // memory.nodes
    host = engine_host(facts, recipe, role=role, ranks=memory.ranks, ranks_per_node=here, weight_bytes=weights)
    return RoleMemory(role, "host", host, round(node.host_bytes * (1 - HOST_RESERVE)))


def _embedded(recipe: Recipe, facts: ModelFacts) -> Ledger:
    """Return the ledger of the embedded engine: weights, and the cache as the recipe sizes it."""
    engine = recipe.engine
    b = DTYPE_BYTES[engine.dtype]
    weights = b * facts.num_parameters()
    cache = round(engine.kv_cache_gib * GIB)
    # the weights that adapters change are also kept unchanged; here all of them
    kept = 0 if recipe.trainer.lora is None else weights
    # a new version is loaded while the old one is served
    return Ledger.of(
        "serving",
        (
            Term("weights", weights, "b P", {"b": b, "P": facts.num_parameters()}),
            Term("weights of the next version", weights, "b P", {"b": b, "P": facts.num_parameters()}),
            *([Term("base of adapters", kept, "b P", {"b": b, "P": facts.num_parameters()})] if kept else []),
            Term("KV cache", cache, "engine.kv_cache_gib"),
            *pool_terms(recipe, 1),
        ),
    )


def _local(recipe: Recipe, cluster: LocalCluster, facts: ModelFacts, real: RealPass | None) -> RoleMemory:
    """Return the place of everything on one machine."""
    memory = replace(trainer_memory(recipe, device="cpu"), real=real)
    peak = trainer_peak(facts, memory)
    # a single-process engine has one node
    ranks, replicas = recipe.trainer.ranks, recipe.engine_nodes or recipe.engine.replicas
    engine = _embedded(recipe, facts).total
    terms: list[Term | None] = [
        Term("trainer ranks", peak.total * ranks, "peak · ranks", {"peak": peak.total, "ranks": ranks})
    ]
    if recipe.sft is None:
        terms.append(Term("engines", engine * replicas, "engine · replicas", {"engine": engine, "replicas": replicas}))
        terms += orchestrator_terms(facts, recipe)
    capacity = None if cluster.memory_gib is None else round(cluster.memory_gib * GIB)
    return RoleMemory(Role.TRAINER, "host", Ledger.of(f"training ({peak.name})", terms), capacity)
