"""Rules between a recipe and the sizes of its model; one table, as `hpcrl.config.rules.table` has for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.engine_shape import engine_ranks_per_node, replica_nodes
from hpcrl.config.load import Loaded
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts
from hpcrl.config.rules.sft import concerns
from hpcrl.errors import ConfigError, Finding
from hpcrl.models.adapting import lora_problems
from hpcrl.models.facts import ModelFacts
from hpcrl.models.freezing import freeze_problems
from hpcrl.models.layers import GatedDeltaNet, Gqa, Mamba2, Mla
from hpcrl.models.quantising import fp8_problems
from hpcrl.models.tensors import DTYPE_BYTES, FP8_BLOCK, Part


@dataclass(frozen=True)
class ModelRule:
    """As `hpcrl.config.rules.rule.Rule`, with the model's facts."""

    name: str
    conflict: str
    hint: str
    check: Callable[[Recipe, ClusterProfile, ModelFacts], Conflicts]


def check_model_rules(recipe: Loaded[Recipe], cluster: Loaded[ClusterProfile], facts: ModelFacts) -> None:
    """Check all rules of `MODEL_RULES`: what recipe and cluster ask of the model that it cannot give.

    Raises
    ------
    ConfigError
        With every conflict, each with the file and line of its key, the name of its rule, and a hint.
    """
    found = [
        Finding(_where(recipe, cluster, key), key, f"{what} [{rule.name}]", rule.hint)
        for rule in MODEL_RULES
        for key, what in rule.check(recipe.value, cluster.value, facts)
        if concerns(recipe.value, key)
    ]
    if found:
        raise ConfigError(found)


def _where(recipe: Loaded[Recipe], cluster: Loaded[ClusterProfile], key: str) -> str:
    return cluster.where(key.removeprefix("cluster.")) if key.startswith("cluster.") else recipe.where(key)


def _replicas(recipe: Recipe, cluster: ClusterProfile) -> Iterator[tuple[str, int]]:
    """Yield the role and the ranks of each replica of vLLM engines."""
    if recipe.engine.backend == "vllm" and isinstance(cluster, SlurmCluster):
        for role, nodes in replica_nodes(recipe).items():
            yield role.value, nodes * engine_ranks_per_node(recipe, cluster, role)


def _experts_divide(recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts) -> Conflicts:
    ep, experts = recipe.trainer.parallelism.ep, facts.num_experts
    if ep > 1 and not experts:
        yield "trainer.parallelism.ep", f"{facts.name} has no experts"
    elif experts % ep:
        yield "trainer.parallelism.ep", f"{ep} does not divide the {experts} experts of {facts.name}"
    if not experts:
        return
    for role, ranks in _replicas(recipe, cluster):
        if experts % ranks:
            key = "engine.nodes" if role == "engine" else f"engine.{role}.nodes"
            yield key, f"{experts} experts cannot be distributed evenly over the {ranks} ranks of a replica of {role}"


def _heads_divide(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    tp = recipe.engine.tp
    for layer in facts.layers:
        mixer = layer.mixer
        if isinstance(mixer, Mamba2):
            fits = mixer.num_heads % tp == 0
        elif isinstance(mixer, GatedDeltaNet):
            fits = mixer.num_key_heads % tp == 0 and mixer.num_value_heads % tp == 0
        elif isinstance(mixer, Gqa):
            kv = mixer.num_key_value_heads
            fits = mixer.num_attention_heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)
        else:
            fits = mixer is None or mixer.num_attention_heads % tp == 0
        if not fits:
            yield "engine.tp", f"{tp} does not divide the heads of {facts.name}"
            return


def _heads_share_context(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    cp = recipe.trainer.parallelism.cp
    if recipe.trainer.parallelism.cp_scheme != "ulysses":
        return
    for layer in facts.layers:
        mixer = layer.mixer
        if isinstance(mixer, Gqa):
            heads, keys = mixer.num_attention_heads, mixer.num_key_value_heads
        elif isinstance(mixer, Mla) and mixer.indexer is None:
            heads = keys = mixer.num_attention_heads
        else:
            continue
        # keys of fewer heads than ranks are repeated, which must fit their groups of queries
        if heads % math.lcm(keys, cp):
            heads_of = f"{heads} query heads on {keys} key heads of {facts.name}"
            yield "trainer.parallelism.cp", f"{cp} ranks cannot share the {heads_of}"
            return


def _sequences_are_whole(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    recurrent = [i for i, layer in enumerate(facts.layers) if isinstance(layer.mixer, Mamba2 | GatedDeltaNet)]
    if recurrent and recipe.trainer.parallelism.cp > 1:
        what = f"{len(recurrent)} layers of {facts.name} have a recurrent state, which cannot be passed between ranks"
        yield "trainer.parallelism.cp", what


def _ring_is_dense(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    parallelism = recipe.trainer.parallelism
    if parallelism.cp == 1 or parallelism.cp_scheme != "ring":
        return
    others = {kind for kind in facts.attention_kinds if kind in ("gqa+window", "gqa+chunk", "mla+dsa")}
    if others:
        kinds = ", ".join(sorted(others))
        yield "trainer.parallelism.cp_scheme", f"ring supports dense attention only; {facts.name} has {kinds}"


def _gather_is_of_latents(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    parallelism = recipe.trainer.parallelism
    if parallelism.cp == 1 or parallelism.cp_scheme != "gather":
        return
    others = {kind for kind in facts.attention_kinds if kind != "mla"}
    if others:
        kinds = ", ".join(sorted(others))
        yield "trainer.parallelism.cp_scheme", f"gather is for layers that attend to latents; {facts.name} has {kinds}"


def _sequence_divides(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    cp = recipe.trainer.parallelism.cp
    if cp > 1 and recipe.trainer.micro_batch_tokens % (2 * cp):
        tokens = recipe.trainer.micro_batch_tokens
        yield (
            "trainer.micro_batch_tokens",
            f"{tokens} cannot be cut into the {2 * cp} equal pieces of context parallelism {cp} (two a rank)",
        )


def _blocks_are_whole(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    if recipe.trainer.precision.fp8 is not None and recipe.engine.backend == "vllm":
        yield from _shared_blocks(facts)
    if recipe.engine.memory.weights == "fp8":
        yield from _partial_blocks(facts, recipe.engine.tp, "engine.memory.weights")


_FOLLOWED = ("q_proj", "k_proj", "gate_proj", "w1", "q_a_proj")
"""Matrices that vLLM has in one with the next of a layer, and quantises so."""


def _shared_blocks(facts: ModelFacts) -> Conflicts:
    for weight in dict.fromkeys(weight for layer in facts.layers for weight in layer.weights):
        module = weight.name.removesuffix(".weight").rpartition(".")[2]
        if weight.quantised and module in _FOLLOWED and len(weight.shape) == 2 and weight.shape[0] % FP8_BLOCK:
            what = f"{weight.name} has {weight.shape[0]} rows, not a multiple of {FP8_BLOCK}"
            yield "trainer.precision.fp8", f"{what}: in vLLM its last block has rows of the next matrix as well"
            return


def _partial_blocks(facts: ModelFacts, tp: int, key: str) -> Conflicts:
    for weight in dict.fromkeys(weight for layer in facts.layers for weight in layer.weights):
        # experts are distributed whole where there are several ranks; only the other weights are sharded
        if tp == 1 or not weight.quantised or weight.tp_dim is None or weight.part is Part.EXPERT:
            continue
        size = weight.shape[weight.tp_dim]
        if size % (FP8_BLOCK * tp):
            yield key, f"{weight.name} has {size} to cut into {tp}, not a multiple of {FP8_BLOCK} x {tp}"
            return
    if facts.hidden_size % FP8_BLOCK:
        yield key, f"hidden_size {facts.hidden_size} is not a multiple of the {FP8_BLOCK} of a scale"


def _replay_has_routers(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    if recipe.trainer.router_replay and not facts.num_experts:
        yield "trainer.router_replay", f"{facts.name} has no routers"
    if recipe.engine.return_routed_experts and not facts.num_experts:
        yield "engine.return_routed_experts", f"{facts.name} has no routers"
    if recipe.returns_routed_experts and recipe.engine.fetches_kv and facts.num_experts_per_tok == 1:
        key = "trainer.router_replay" if recipe.trainer.router_replay else "engine.return_routed_experts"
        yield (
            key,
            f"{facts.name} has one expert a token: fetched KV cannot be distinguished from tokens of expert 0",
        )


def _blocks_hold_prompts(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    recurrent = sum(isinstance(layer.mixer, Mamba2 | GatedDeltaNet) for layer in facts.layers)
    if recurrent and recipe.engine.backend == "embedded" and recipe.engine.fetches_kv:
        key = "engine.prefill" if recipe.engine.prefill is not None else "engine.kv_store"
        what = f"{recurrent} layers of {facts.name} have a state, which embedded engines do not transfer"
        yield key, f"{what}: each engine would compute every prompt itself"


def _freeze_fits(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    if recipe.trainer.freeze is not None:
        yield from (("trainer.freeze", problem) for problem in freeze_problems(facts, recipe.trainer.freeze))


def _fp8_fits(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    fp8, key = recipe.trainer.precision.fp8, "trainer.precision.fp8"
    if fp8 is not None:
        problems = fp8_problems(facts, linears=fp8.linears, experts=fp8.experts, keep=fp8.keep)
        yield from ((key if name is None else f"{key}.{name}", what) for name, what in problems)


def _adapters_fit(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    if (lora := recipe.trainer.lora) is not None:
        yield from (("trainer.lora.targets", problem) for problem in lora_problems(facts, lora.targets))


def _context_in_model(recipe: Recipe, _: ClusterProfile, facts: ModelFacts) -> Conflicts:
    most = facts.max_position_embeddings
    if recipe.sft is not None and recipe.sft.max_len > most:
        yield "sft.max_len", f"{recipe.sft.max_len} is more than the {most} positions of {facts.name}"
    length = recipe.engine.max_model_len
    if length > most:
        yield "engine.max_model_len", f"{length} is more than the {most} positions of {facts.name}"


def _read_seconds(recipe: Recipe, cluster: SlurmCluster, size: int) -> float | None:
    """Return the seconds until all engines have read ``size`` bytes each from the shared filesystem; None: unknown."""
    together, node = cluster.filesystem.read_gb_s, cluster.filesystem.node_read_gb_s
    if together is None or node is None:
        return None
    engine = recipe.engine
    sides = [(side.replicas, side.nodes) for side in (engine.prefill, engine.decode) if side is not None]
    groups = sides or [(engine.replicas, engine.nodes)]
    slowest = max(size / (nodes * node * 1e9) for _, nodes in groups)
    return max(slowest, sum(replicas for replicas, _ in groups) * size / (together * 1e9))


def _time_to_move(recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts) -> Conflicts:
    if not isinstance(cluster, SlurmCluster):
        return
    handoff, parameters = recipe.handoff, facts.num_parameters()
    dtype = handoff.dtype or recipe.trainer.dtype
    # block scales, which add only 1/4096, are left out
    published = parameters * (1 if handoff.kind == "fp8" else DTYPE_BYTES[dtype])
    seconds = _read_seconds(recipe, cluster, published)
    limits = [("handoff.update_timeout_s", handoff.update_timeout_s, "read a version of")]
    if recipe.engine.backend == "vllm":
        limits.append(("cluster.limits.start_timeout_s", cluster.limits.start_timeout_s, "load"))
    for key, limit, what in limits:
        if seconds is not None and limit < seconds:
            yield key, f"{limit:g} s, but engines need {seconds:.0f} s to {what} {published / 1e9:,.0f} GB"
    # master weights and two moments in float32
    saved = 12 * parameters
    checkpoint, write, read = recipe.checkpoint, cluster.filesystem.write_gb_s, cluster.filesystem.read_gb_s
    moved = [
        ("handoff.publish_timeout_s", handoff.publish_timeout_s, "version", published, write),
        ("cluster.limits.save_timeout_s", cluster.limits.save_timeout_s, "checkpoint", saved, write),
        ("checkpoint.save_timeout_s", checkpoint.save_timeout_s, "checkpoint", saved, write),
    ]
    if checkpoint.verify == "content":
        moved.append(("checkpoint.verify_timeout_s", checkpoint.verify_timeout_s, "checkpoint", saved, read))
    for key, limit, what, size, rate in moved:
        if rate is not None and limit < size / (rate * 1e9):
            yield key, f"{limit:g} s, but a {what} of {size / 1e9:,.0f} GB takes {size / (rate * 1e9):.0f} s"


MODEL_RULES: tuple[ModelRule, ...] = (
    ModelRule(
        "experts-divide",
        "Experts are distributed evenly.",
        "choose trainer.parallelism.ep, and the GPUs of a replica, as divisors of the number of experts",
        _experts_divide,
    ),
    ModelRule(
        "heads-divide", "Heads are distributed evenly.", "choose engine.tp as a divisor of the heads", _heads_divide
    ),
    ModelRule(
        "heads-share-context",
        "Ranks of a context-parallel group have equal shares of the heads.",
        "choose trainer.parallelism.cp as a divisor of the query heads that key heads fit into, or cp_scheme: ring",
        _heads_share_context,
    ),
    ModelRule(
        "state-in-sequence",
        "Sequences of recurrent layers are not split over ranks.",
        "set trainer.parallelism.cp: 1, and a smaller trainer.micro_batch_tokens",
        _sequences_are_whole,
    ),
    ModelRule(
        "ring-is-dense",
        "Ring attention is for attention that sees all keys.",
        "set trainer.parallelism.cp_scheme: ulysses",
        _ring_is_dense,
    ),
    ModelRule(
        "gather-is-of-latents",
        "Only dense latent attention has latents to gather for context parallelism.",
        "set trainer.parallelism.cp_scheme: ulysses, which gathers the keys of sparse attention as well",
        _gather_is_of_latents,
    ),
    ModelRule(
        "sequence-divides",
        "A micro-batch can be cut evenly for context parallelism.",
        "choose trainer.micro_batch_tokens as a multiple of twice cp",
        _sequence_divides,
    ),
    ModelRule(
        "fp8-blocks",
        "Matrices in FP8 consist of whole blocks of 128 on every rank, the same in trainer and engines.",
        "lower engine.tp, or keep this side out of FP8",
        _blocks_are_whole,
    ),
    ModelRule(
        "replay-has-routers",
        "Routed experts need a model with experts, and at least two a token if KV is fetched from a pool or the host.",
        "set trainer.router_replay and engine.return_routed_experts: false",
        _replay_has_routers,
    ),
    ModelRule(
        "blocks-hold-prompts",
        "KV blocks hold the whole state of a prompt if engines exchange them.",
        "set engine.backend: vllm, or remove prefill, decode and kv_store",
        _blocks_hold_prompts,
    ),
    ModelRule(
        "freeze-fits",
        "Frozen parameters exist, and some parameters are left to train.",
        "give patterns of published names, such as '*.mlp.gate.weight', or remove trainer.freeze",
        _freeze_fits,
    ),
    ModelRule(
        "fp8-fits",
        "Modules that FP8 keeps exist, and some are left to be multiplied in FP8.",
        "give published names of modules, such as '*.self_attn.kv_b_proj' or '*.experts.*', experts: false where they "
        "are one tensor, or leave trainer.precision.fp8 out",
        _fp8_fits,
    ),
    ModelRule(
        "adapters-fit",
        "The model has the targets of the adapters.",
        "name targets that it has, or leave trainer.lora.targets out for all of them",
        _adapters_fit,
    ),
    ModelRule(
        "context-in-model",
        "The engine's context, and conversations of supervised training, are within the model's positions.",
        "lower engine.max_model_len or sft.max_len, or choose a model with more positions",
        _context_in_model,
    ),
    ModelRule(
        "time-to-move",
        "Timeouts are longer than the transfer over the shared filesystem takes.",
        "raise the timeout, or correct the rates of filesystem in the profile",
        _time_to_move,
    ),
)
"""All rules; docs/planning.md lists them."""
