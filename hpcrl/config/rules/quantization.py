"""Rules about FP8: where weights become it, and that trainer and engines have the same."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.engine_shape import vllm_flag
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule, trainer_needs_gpus

__all__ = ["QUANTIZATION_RULES"]


def _quantized_once(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    if engine.backend != "vllm":
        return
    flags, published = vllm_flag(recipe, "quantization"), recipe.handoff.kind == "fp8"
    if published:
        for key, value in flags:
            yield key, f"{value!r} quantises what handoff.kind: fp8 has quantised"
    elif engine.memory.weights == "fp8" and not flags:
        yield "engine.memory.weights", "nothing makes FP8 of the weights: hand-offs are not, and vLLM is not told to"
    if engine.memory.weights != "fp8" and (flags or published):
        yield "engine.memory.weights", "is as_dtype, but engines hold FP8: plans would count too much"


def _fp8_is_one(recipe: Recipe, _: ClusterProfile) -> Conflicts:
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


QUANTIZATION_RULES: tuple[Rule, ...] = (
    Rule(
        "quantized-once",
        "Weights become FP8 in one place, and plans know.",
        "set engine.memory.weights: fp8 with either handoff.kind: fp8 or vllm_args.quantization: fp8_per_block; or "
        "neither and as_dtype",
        _quantized_once,
    ),
    Rule(
        "fp8-is-one",
        "A trainer in FP8 and its engines have the same FP8 weights.",
        "set handoff.kind: fp8, without handoff.dtype and quantization of vllm_args, or for all vLLM engines "
        "quantization: fp8_per_block and trainer.precision.fp8 without linears, experts and keep",
        _fp8_is_one,
    ),
    Rule(
        "fp8-multiplies",
        "What multiplies in FP8 is for the trainer's nodes.",
        "set trainer.precision.fp8.backend: auto, or trainer.dtype: bfloat16 on nodes with GPUs",
        _fp8_multiplies,
    ),
)
