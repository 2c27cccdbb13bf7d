"""Rules about FP8: where weights become it, and that trainer and engines have the same."""

from __future__ import annotations

import re

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.engine_shape import engine_gpus, vllm_flag
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule, profile_variables, trainer_needs_gpus

_POWERS_OF_TWO = "VLLM_USE_DEEP_GEMM_E8M0"
"""Variable by which vLLM rounds scales up to powers of two; plans set it to 0 with a trainer in FP8."""
_BLACKWELL = re.compile(r"(?<![a-z])g?b[123]00|(?<![a-z])rtx.?pro", re.IGNORECASE)
"""Names of GPUs that multiply with scales that are powers of two, and with no others."""


def _quantised_once(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    if engine.backend != "vllm":
        return
    flags, published = vllm_flag(recipe, "quantization"), recipe.handoff.kind == "fp8"
    if published:
        for key, value in flags:
            yield key, f"{value!r} quantises what handoff.kind: fp8 has quantised"
    elif engine.memory.weights == "fp8" and not flags:
        yield "engine.memory.weights", "weights would not be in FP8: neither hand-offs nor vLLM quantise them"
    if engine.memory.weights != "fp8" and (flags or published):
        yield "engine.memory.weights", "is as_dtype, but engines hold FP8: plans would count too much"


def _fp8_is_one(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    yield from _one_quantiser(recipe)
    yield from _same_scales(recipe, cluster)


def _same_scales(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    """Report GPUs and environments of engines that change scales; a local run's GPUs are not known."""
    sides = ("engine",) if recipe.engine.prefill is None else ("prefill", "decode")
    if recipe.trainer.precision.fp8 is None or recipe.engine.backend != "vllm" or not isinstance(cluster, SlurmCluster):
        return
    for side in sides:
        if not engine_gpus(recipe, cluster, Role(side)):
            continue
        partition = cluster.partition_name(side)
        gpu_type = cluster.partitions[partition].node.gpu_type
        if gpu_type is not None and _BLACKWELL.search(gpu_type):
            yield (
                f"cluster.partitions.{partition}.node.gpu_type",
                f"engines on {gpu_type} multiply with scales that are powers of two, and the trainer's are not",
            )
        for key, value in profile_variables(cluster, ("engine", side), _POWERS_OF_TWO):
            if value != "0":
                yield key, f"is {value!r}: vLLM would round the scales of FP8 weights up to powers of two"


def _one_quantiser(recipe: Recipe) -> Conflicts:
    fp8, handoff, dtype, engine = recipe.trainer.precision.fp8, recipe.handoff, recipe.trainer.dtype, recipe.engine
    if fp8 is None:
        return
    if handoff.dtype not in (None, dtype):
        yield "handoff.dtype", f"engines get FP8 of weights in {handoff.dtype}, and the trainer makes it of {dtype}"
    if handoff.kind == "fp8":
        return
    flags = dict(vllm_flag(recipe, "quantization")) if engine.backend == "vllm" else {}
    sides = {f"engine.{side}.vllm_args.quantization" for side in ("prefill", "decode")}
    if "engine.vllm_args.quantization" not in flags and not (engine.prefill is not None and sides <= flags.keys()):
        yield (
            "handoff.kind",
            f"is {handoff.kind}, and engines make no FP8 of it: the trainer has other weights",
        )
    for key, value in flags.items():
        if value != "fp8_per_block":
            yield key, f"{value!r} quantises in another way than the trainer, which has blocks of 128 x 128"
    if flags and not (fp8.linears and fp8.experts and not fp8.keep):
        yield "trainer.precision.fp8", "keeps matrices that engines quantise: those that do it themselves take all"
    if flags and engine.dtype != dtype:
        yield "engine.dtype", f"engines make FP8 of weights in {engine.dtype}, and the trainer of {dtype}"


def _fp8_multiplies(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    fp8, key = recipe.trainer.precision.fp8, "trainer.precision.fp8.backend"
    if fp8 is None or fp8.backend in ("auto", "reference"):
        return
    if recipe.trainer.dtype != "bfloat16":
        yield key, f"{fp8.backend} multiplies into bfloat16, and trainer.dtype is {recipe.trainer.dtype}"
    yield from trainer_needs_gpus(cluster, key, fp8.backend)


QUANTISATION_RULES: tuple[Rule, ...] = (
    Rule(
        "quantised-once",
        "Weights are quantised to FP8 in one place, and plans count it.",
        "set engine.memory.weights: fp8 with either handoff.kind: fp8 or vllm_args.quantization: fp8_per_block; or "
        "neither and as_dtype",
        _quantised_once,
    ),
    Rule(
        "fp8-is-one",
        "A trainer in FP8 and its engines have the same FP8 weights.",
        "set handoff.kind: fp8, without handoff.dtype and quantization of vllm_args, or for all vLLM engines "
        "quantization: fp8_per_block and trainer.precision.fp8 without linears, experts and keep; engines on "
        "Hopper, with VLLM_USE_DEEP_GEMM_E8M0 as plans set it",
        _fp8_is_one,
    ),
    Rule(
        "fp8-multiplies",
        "The FP8 backend supports the trainer's nodes and dtype.",
        "set trainer.precision.fp8.backend: auto, or trainer.dtype: bfloat16 on nodes with GPUs",
        _fp8_multiplies,
    ),
)
