"""Host memory of a node by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.config.rollouts import PAYLOAD_COPIES
from hpcrl.jobplan.commands.vllm import own_flags
from hpcrl.models.adapting import adapted_blocks
from hpcrl.models.facts import ModelFacts
from hpcrl.models.rooms import room_bytes
from hpcrl.models.tensors import Part
from hpcrl.planning.ledger import GIB, Ledger, Term
from hpcrl.planning.memory.padding import model_padding, rounded_gradients
from hpcrl.planning.memory.settings import TrainerMemory, checkpoint_term, image_term, reference_term
from hpcrl.planning.muon import moments_formula, spared_bytes
from hpcrl.planning.routes import rollout_routes_bytes, token_routes_bytes

PROCESS_BYTES = int(4.0 * GIB)
"""A Python process with torch and CUDA: libraries, pinned pools, allocator."""
ORCHESTRATOR_BYTES = int(2.0 * GIB)
"""The orchestrator without rollouts."""
TOKEN_RECORD_BYTES = 17
"""A token of a rollout: id, log-probability, version and advantage of 4 bytes each, and a mask."""
TEACHER_BYTES = 4
"""Bytes a token of a teacher's log-probability."""
KEPT_ROWS_BYTES = 1 << 30
"""Rows of experts that a server keeps until they are fetched (`hpcrl.inference.kept_rows`)."""
ENVIRONMENT_BYTES = 4 << 20
"""A rollout in flight: its conversation, its requests, its share of an environment's process."""
SEGMENT_BYTES = 64 << 20
"""A segment of a version (`hpcrl.weights.format.segments`), for which a reader registers memory."""
WORKER_PROCESS_BYTES = 128 << 20
"""A worker of environments, or the process of one of its environments, without rollouts and without data."""


def trainer_host(
    facts: ModelFacts, memory: TrainerMemory, recipe: Recipe, *, ranks_per_node: int, orchestrator: bool
) -> Ledger:
    """Return the ledger of the trainer's first node; ``orchestrator``: whether the orchestrator runs there as well."""
    return Ledger.of("training", _trainer(facts, memory, recipe, ranks_per_node, orchestrator=orchestrator))


def _trainer(
    facts: ModelFacts, m: TrainerMemory, recipe: Recipe, per_node: int, *, orchestrator: bool
) -> Iterator[Term | None]:
    n = m.shards
    # the sizes of the fullest ranks, because most ranks are full
    p = facts.num_parameters() + model_padding(facts, shards=n, ep=m.ep)
    yield Term("processes", PROCESS_BYTES * per_node, "ranks · constant", {"ranks": per_node}, "assumed")
    if m.optimizer_offload:
        spared = spared_bytes(facts, muon=m.muon)
        inputs: dict[str, float | str] = {"P + padding": p, "N": n, "ranks": per_node}
        formula = f"{moments_formula('8 (P + padding)', spared, inputs)} · ranks"
        yield Term("optimizer state", (8 * p - spared) // n * per_node, formula, inputs)
    if m.parameter_offload:
        spared = spared_bytes(facts, muon=m.muon)
        inputs = {"P + padding": p, "N": n, "ranks": per_node}
        formula = f"{moments_formula('12 (P + padding)', spared, inputs)} · ranks"
        yield Term("parameters and optimizer", (12 * p - spared) // n * per_node, formula, inputs)
        gradients = rounded_gradients(facts, shards=n, ep=m.ep) * per_node
        yield Term("gradients", gradients, "Σ 2^⌈log2(4 g / N)⌉ over tensors · ranks", {"N": n, "ranks": per_node})
    if m.offloads_activations:
        layers = -(-len(facts.layers) // m.checkpoint_every_layers)
        value = room_bytes(m.tokens * facts.hidden_size * m.element_bytes) * layers * per_node
        inputs = {"T": m.tokens, "D": facts.hidden_size, "L": layers, "b": m.element_bytes}
        yield Term("activations", value, "room(T D b) · L · ranks", inputs)
    if m.reference_on_host:
        yield reference_term(facts, m, ranks_here=per_node)
    images = image_term(facts, m, ranks_here=per_node)
    yield images
    if recipe.handoff.transport == "fabric":
        count = recipe.handoff.fabric_versions
        formula, inputs = "V / N · fabric_versions · ranks", {"fabric_versions": count}
        yield Term("versions served over the fabric", images.value // m.images * count, formula, inputs)
    if recipe.handoff.delta_chain:
        share = recipe.handoff.delta_max_share
        yield Term("changes of a delta", round(images.value / m.images * share), "V / N · delta_max_share · ranks")
    yield checkpoint_term(facts, m, ranks_here=per_node)
    if recipe.sft is None and orchestrator:
        yield from orchestrator_terms(facts, recipe)
    elif recipe.sft is None:
        workers = recipe.environment_workers
        if workers is not None and not workers.apart:
            yield from environment_terms(recipe, workers.count)
        yield _shared_rollouts(facts, recipe, m.cp, per_node)
    yield Term("page cache of a hand-off", images.value // m.images, "V / N · ranks", {}, "assumed", counts=False)


def orchestrator_terms(facts: ModelFacts, recipe: Recipe, *, apart: bool = False) -> Iterator[Term | None]:
    """Yield the terms of the orchestrator with the maximum number of rollouts that may exist at once.

    Parameters
    ----------
    apart:
        Whether it has a node of its own: workers of environments on the trainer's node are not there.
    """
    yield Term("orchestrator", ORCHESTRATOR_BYTES, "constant", {}, "assumed")
    flying, length = recipe.rollouts.max_in_flight, recipe.engine.max_model_len
    token = _record_bytes(recipe)
    inputs = {"in flight": flying, "tokens": length, "token": token, "copies": PAYLOAD_COPIES}
    value = flying * length * token * PAYLOAD_COPIES
    yield Term("rollouts", value, "in flight · tokens · token · copies", inputs)
    workers = recipe.environment_workers
    if workers is None:
        yield Term("environments", flying * ENVIRONMENT_BYTES, "in flight · constant", {"in flight": flying}, "assumed")
    elif not workers.apart and not apart:
        yield from environment_terms(recipe, workers.count)
    routes = _routes_bytes(facts, recipe)
    yield _warehouse(recipe, token + routes)
    if routes:
        inputs = {"in flight": flying, "tokens": length, "token": routes, "copies": PAYLOAD_COPIES}
        yield _routes_in_flight(recipe, flying, rollout_routes_bytes(recipe, facts), inputs)
        if recipe.engine.fetches_kv:
            yield Term(
                "routed experts of prompts", round(recipe.engine.routed_experts_gib * GIB), "engine.routed_experts_gib"
            )


def _record_bytes(recipe: Recipe) -> int:
    """Return the bytes of a token of a rollout, without its routed experts."""
    return TOKEN_RECORD_BYTES + (0 if recipe.algorithm.distillation is None else TEACHER_BYTES)


def _routes_bytes(facts: ModelFacts, recipe: Recipe) -> int:
    """Return the bytes of a token's routed experts; 0 where engines do not return them."""
    return token_routes_bytes(facts) if recipe.returns_routed_experts else 0


def environment_terms(recipe: Recipe, here: int) -> Iterator[Term]:
    """Yield the terms of a node with ``here`` of the workers of environments."""
    workers, flying, kinds = recipe.environment_workers, recipe.rollouts.max_in_flight, len(recipe.environments)
    assert workers is not None
    inputs: dict[str, float | str] = {"workers": here, "environments": kinds}
    value = here * (1 + kinds) * WORKER_PROCESS_BYTES
    yield Term("environment workers", value, "workers · (1 + environments) · constant", inputs, "assumed")
    inputs = {"in flight": flying, "here": here, "workers": workers.count}
    value = -(-flying * here // workers.count) * ENVIRONMENT_BYTES
    yield Term("environments", value, "in flight · here / workers · constant", inputs, "assumed")


def _routes_in_flight(recipe: Recipe, flying: int, one: int, inputs: Mapping[str, float]) -> Term:
    """Return the term of routed experts of rollouts in flight, of which one may need ``one`` bytes."""
    most, formula = flying * one, "in flight · tokens · layers · k · w · copies"
    limit = recipe.rollouts.routes_in_flight_gib
    if limit is None or most <= round(limit * GIB):
        return Term("routed experts", most, formula, inputs)
    if round(limit * GIB) < one:
        return Term("routed experts", one, f"one rollout: rollouts.routes_in_flight_gib ({limit:g}) holds none", inputs)
    return Term("routed experts", round(limit * GIB), f"min(rollouts.routes_in_flight_gib, {formula})", inputs)


def _warehouse(recipe: Recipe, token_bytes: int) -> Term | None:
    """Return the term of finished rollouts: waiting batches, one that is trained, and one that is fetched meanwhile.

    On a node without the orchestrator its ranks share the latter two (`_shared_rollouts`): never more.
    """
    settings = recipe.rollouts
    limit = round(settings.warehouse.limit_gib * GIB)
    if settings.warehouse.backend == "mooncake":  # memory that the pool gets at the start
        return Term("warehouse of rollouts", limit, "rollouts.warehouse.limit_gib")
    if settings.warehouse.directory is None:
        return None
    count = (settings.ready_batches + 2) * settings.rollouts_per_step
    inputs = {"rollouts": count, "tokens": recipe.engine.max_model_len, "token": token_bytes, "limit": limit}
    value = min(limit, count * recipe.engine.max_model_len * token_bytes)
    return Term("warehouse of rollouts", value, "min(limit_gib, rollouts · tokens · token)", inputs)


def _shared_rollouts(facts: ModelFacts, recipe: Recipe, cp: int, per_node: int) -> Term | None:
    """Return the term of what ranks of a node without the orchestrator share (`hpcrl.dock.warehouse.sharing`).

    These are the batch that is trained and the one that is fetched meanwhile; ranks of one context-parallel group train
    on the same rollouts.
    """
    settings = recipe.rollouts
    together = cp > 1 and per_node > 1 and settings.warehouse.backend == "embedded"
    if not together or settings.warehouse.directory is None:
        return None
    token, tokens = _record_bytes(recipe) + _routes_bytes(facts, recipe), recipe.engine.max_model_len
    limit, count = round(settings.warehouse.limit_gib * GIB), 2 * settings.rollouts_per_step
    inputs = {"rollouts": count, "tokens": tokens, "token": token, "limit": limit}
    value = min(limit, count * tokens * token)
    return Term("shared rollouts", value, "min(limit_gib, rollouts · tokens · token)", inputs)


def engine_host(
    facts: ModelFacts, recipe: Recipe, *, role: Role, ranks: int, ranks_per_node: int, weight_bytes: int
) -> Ledger:
    """Return the ledger of a node of an engine of ``ranks`` GPUs; ``weight_bytes`` are the weights of one GPU."""
    terms = _engine(facts, recipe, ranks, ranks_per_node, weight_bytes, role=role)
    return Ledger.of(f"serving ({role.value})", terms)


def _engine(
    facts: ModelFacts, recipe: Recipe, ranks: int, per_node: int, weight_bytes: int, *, role: Role
) -> Iterator[Term | None]:
    offload = round(recipe.engine.memory.kv_offload_gib * GIB)
    yield Term("processes", PROCESS_BYTES * per_node, "ranks · constant", {"ranks": per_node}, "assumed")
    yield _next_version(facts, recipe, role, ranks, per_node)
    if recipe.trainer.lora is not None:
        yield _kept_base(facts, recipe, role, ranks, per_node)
    yield Term("KV offload", offload, "engine.memory.kv_offload_gib")
    if recipe.returns_routed_experts:
        # each rank has a server
        value = KEPT_ROWS_BYTES * per_node
        yield Term("kept routed experts", value, "ranks · constant", {"ranks": per_node})
    yield from pool_terms(recipe, per_node)
    if recipe.handoff.node_cache is not None:
        cache = round(recipe.handoff.node_cache_gib * GIB)
        yield Term("window of a version on the node", cache, "handoff.node_cache_gib")
    if recipe.handoff.transport == "fabric":
        streams = recipe.handoff.read_streams
        formula = "segment · read_streams · ranks"
        inputs = {"segment": SEGMENT_BYTES, "read_streams": streams, "ranks": per_node}
        yield Term("segments pulled over the fabric", SEGMENT_BYTES * streams * per_node, formula, inputs)
    read = weight_bytes * per_node
    yield Term("page cache of weights", read, "W per GPU · ranks", {"W": weight_bytes}, counts=False)


def pool_terms(recipe: Recipe, ranks: int) -> Iterator[Term]:
    """Yield the terms of the pool on a node with ``ranks`` ranks of an engine; nothing without a pool."""
    store = recipe.engine.kv_store
    if store is not None:
        yield Term("Mooncake segment", round(store.segment_gib * GIB), "engine.kv_store.segment_gib")
        buffers = round(store.local_buffer_gib * GIB) * ranks
        inputs = {"buffer": store.local_buffer_gib, "ranks": ranks}
        yield Term("Mooncake buffers", buffers, "engine.kv_store.local_buffer_gib · ranks", inputs)


def _next_version(facts: ModelFacts, recipe: Recipe, role: Role, ranks: int, per_node: int) -> Term:
    """Return the bytes that the workers of a node read before requests are frozen (`hpcrl.inference.vllm.staging`).

    A rank reads its own experts and all other parameters as they were published. Where experts move it reads all.
    """
    fp8 = recipe.handoff.kind == "fp8"
    by_part = facts.weight_bytes(recipe.handoff.dtype or recipe.trainer.dtype, fp8=fp8)
    experts = by_part.get(Part.EXPERT, 0)
    other = sum(by_part.values()) - experts
    moving = _experts_move(recipe, role)
    value = (experts // (1 if moving else ranks) + other) * per_node
    inputs = {"W_experts": experts, "W_other": other, "ranks": ranks, "here": per_node}
    formula = "(W_experts + W_other) · here" if moving else "(W_experts / ranks + W_other) · here"
    return Term("next version", value, formula, inputs)


def _kept_base(facts: ModelFacts, recipe: Recipe, role: Role, ranks: int, per_node: int) -> Term:
    """Return the bytes that workers keep of the base of adapters.

    Each rank keeps its part of the blocks that adapters change, up to a limit.
    """
    assert recipe.trainer.lora is not None
    dtype = recipe.handoff.dtype or recipe.trainer.dtype
    experts, other = adapted_blocks(facts, recipe.trainer.lora.targets, dtype)
    limit = round(recipe.handoff.adapter_base_gib * GIB)
    rank = experts // (1 if _experts_move(recipe, role) else ranks) + other
    inputs = {"W_experts": experts, "W_other": other, "ranks": ranks, "here": per_node, "limit": limit}
    formula = "min(limit, adapted (W_experts / ranks + W_other)) · here"
    return Term("kept base of adapters", min(rank, limit) * per_node, formula, inputs)


def _experts_move(recipe: Recipe, role: Role) -> bool:
    return bool(own_flags(recipe, role).get("enable-eplb"))
