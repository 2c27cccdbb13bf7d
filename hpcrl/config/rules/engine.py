"""Rules about engines: what of a recipe this version can run, and which flags of vLLM are its own."""

from __future__ import annotations

import re

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.engine_shape import engine_ranks_per_node, replica_nodes, vllm_args
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule
from hpcrl.config.vllm import owner_of

_FLAG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*(\.[\w.]+)?")


def _payload_exists(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if recipe.job.payload == "probe":
        return
    engine = recipe.engine
    if engine.prefill is not None and recipe.job.layout == "elastic":
        yield "engine.prefill", "the router between prefill and decode does not support elastic replicas"
    if engine.backend == "vllm" and _largest_replica(recipe, cluster) > 1:
        yield from _wide_runs(recipe, cluster)


def _wide_runs(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    """Report connectors that replicas of several ranks cannot use."""
    engine = recipe.engine
    gpus = engine.device == "auto" and cluster.uses_slurm
    if engine.prefill is not None and (engine.kv_transfer == "mooncake" or not (gpus or engine.kv_transfer == "nixl")):
        yield (
            "engine.kv_transfer",
            "Mooncake's connector does not support replicas of several ranks, and NIXL needs GPUs",
        )


def _dynamo_can(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    if engine.router.kind != "dynamo":
        return
    if engine.backend != "vllm":
        yield "engine.router.kind", f"engines of the backend {engine.backend!r} do not report cached blocks to Dynamo"
    elif engine.prefill is not None:
        yield "engine.router.kind", "Dynamo's selection does not support prefill and decode"


def _largest_replica(recipe: Recipe, cluster: ClusterProfile) -> int:
    """Return the ranks of the widest replica."""
    return max(n * engine_ranks_per_node(recipe, cluster, role) for role, n in replica_nodes(recipe).items())


def _prefill_has_a_router(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    if engine.prefill is not None and engine.router.kind == "direct":
        yield "engine.router.kind", "prefill and decode need a router between them"
    if engine.kv_transfer != "auto" and engine.prefill is None:
        yield "engine.kv_transfer", "has no effect without prefill and decode"
    elif engine.kv_transfer != "auto" and engine.backend != "vllm":
        yield (
            "engine.kv_transfer",
            f"engines of the backend {engine.backend!r} transfer KV by their own protocol",
        )


def _vllm_stands(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.engine.backend == "vllm" and recipe.engine.pause != "keep":
        yield (
            "engine.pause",
            "vLLM loads weights into its layers in place, over several calls: a step between two of them is computed "
            "by layers of two versions, and by some that have no weights yet",
        )


def _own_flags(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, flag, _value in vllm_args(recipe):
        if reason := owner_of(flag):
            yield key, f"hpcrl sets --{flag} itself: {reason}"


def _flag_names(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, flag, value in vllm_args(recipe):
        if not _FLAG.fullmatch(flag):
            yield key, f"{flag!r} is not a long flag name: write it without leading dashes, with dashes inside"
        elif value is None:
            yield key, "has no value"


def _args_for_vllm(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.engine.backend != "vllm":
        for key, _flag, _value in vllm_args(recipe):
            yield key, f"has no effect on engines of the backend {recipe.engine.backend!r}"


PAYLOAD_RULE = Rule(
    "payload-exists",
    "This version can start all parts of the run.",
    "for prefill and decode choose another layout than elastic, and kv_transfer: nixl where replicas have several "
    "ranks; or try the shape of the job: --set job.payload=probe",
    _payload_exists,
    submit_only=True,
)

ENGINE_RULES: tuple[Rule, ...] = (
    Rule("own-vllm-flags", "A recipe gives vLLM no flag that hpcrl sets.", "remove it from vllm_args", _own_flags),
    Rule("vllm-flag-names", "Flags of vLLM are long names with values.", "correct the name", _flag_names),
    Rule(
        "dynamo-engines",
        "Dynamo's router has engines that it supports.",
        "set engine.router.kind: auto",
        _dynamo_can,
    ),
    Rule(
        "prefill-decode-router",
        "Prefill and decode have a router between them.",
        "set engine.router.kind: auto, and kv_transfer only for vLLM's prefill and decode",
        _prefill_has_a_router,
    ),
    Rule(
        "vllm-pause",
        "vLLM's requests are frozen while its weights change.",
        "set engine.pause: keep; none is for engine.backend: embedded, which reads into a second copy of the model",
        _vllm_stands,
    ),
    Rule("vllm-args-apply", "Flags of vLLM are for vLLM.", "set engine.backend: vllm, or remove them", _args_for_vllm),
)
