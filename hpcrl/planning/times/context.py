"""Times of context parallelism in a step: the exchanges of attention among the ranks of a group, and repeated work."""

from __future__ import annotations

import math

from hpcrl.models.layers import Gqa, Layer, Mla
from hpcrl.planning.collectives import RankGroup, all_gather, all_to_all
from hpcrl.planning.times.shapes import TrainerShape
from hpcrl.planning.times.step_work import StepWork
from hpcrl.planning.times.terms import Seconds, attempt


def context_terms(step: StepWork, tokens: float) -> list[Seconds]:
    """Return the times of context parallelism for ``tokens`` a rank and micro-batch."""
    found = [_keys_and_values(step, tokens)]
    if step.shape.cp_scheme == "gather":
        found.append(_expansion(step))
    return found


def _keys_and_values(step: StepWork, tokens: float) -> Seconds:
    shape = step.shape
    layers = step.facts.distinct_layers
    whole = tokens * shape.context_parallel * sum(count * _gathered_bytes(layer, shape) for layer, count in layers)
    sent = tokens * sum(count * _exchanged_bytes(layer, shape) for layer, count in layers)
    group, count = RankGroup.inner(shape.context_parallel, shape.gpus_per_node), step.packing.micro_batches
    # gradients count twice, as in float32; in a ring keys travel with them, and nothing is kept of the way there.
    # Those of gathered latents go back as they are, each to its rank, which adds them up: as many bytes as came
    behind = {"ring": 3, "gather": 1, "ulysses": 2}[shape.cp_scheme]
    times = behind + (step.passes if shape.cp_scheme == "ring" else step.part_passes("exchanges"))

    def seconds() -> float:
        links = step.rates.collectives
        gathered = all_gather(whole, group, links) if whole else 0.0
        return times * count * (gathered + (all_to_all(sent, group, links) if sent else 0.0))

    return attempt(
        "cp.keys_and_values",
        seconds,
        "times * micro-batches * (all_gather(tokens * KV bytes, CP) + all_to_all(tokens * bytes of heads, CP))",
        {"bytes": whole, "bytes sent": sent, "times": times, "micro-batches": count},
    )


def _expansion(step: StepWork) -> Seconds:
    """Return the seconds of expanding other ranks' latents to keys and values, again in the backward pass.

    The rank is one near the edges of sequences, which expands all tokens; the time of its own tokens is with its linear
    layers.
    """
    shape, count = step.shape, step.shape.context_parallel
    layers = [(layer.mixer, number) for layer, number in step.facts.distinct_layers if isinstance(layer.mixer, Mla)]
    made = sum(
        2 * number * mixer.kv_lora_rank * mixer.num_attention_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
        for mixer, number in layers
    )
    # selective recomputation keeps the output of attention
    times = count * (step.part_passes("scores") + 1 + step.backward_products) - (step.passes + step.backward_products)
    return attempt(
        "cp.expansion",
        lambda: times * made * step.gpu_tokens / step.rate("linear") / step.busy,
        "(CP * (passes + 1 + backward) - linear passes) * operations a token * tokens a GPU / rate / trainer_busy",
        {"times": times, "operations a token": made, "tokens a GPU": step.gpu_tokens, "CP": shape.context_parallel},
    )


def _gathered_bytes(layer: Layer, shape: TrainerShape) -> int:
    """Return the bfloat16 bytes of a token that each rank of a context-parallel group gets from each other rank."""
    mixer = layer.mixer
    if mixer is None or _exchanged_bytes(layer, shape):
        return 0
    if shape.cp_scheme == "ring" and isinstance(mixer, Mla):
        # expanded, for each head
        return 2 * mixer.num_attention_heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim)
    return mixer.kv_bytes_per_token("bfloat16")


def _exchanged_bytes(layer: Layer, shape: TrainerShape) -> int:
    """Return the bfloat16 bytes of a token's queries, keys, values and output.

    They are sent once to the rank of each head, and the output back.
    """
    mixer = layer.mixer
    if shape.cp_scheme != "ulysses":
        return 0
    if isinstance(mixer, Mla) and mixer.topk is None:
        key = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
        return 2 * mixer.num_attention_heads * 2 * (key + mixer.v_head_dim)
    if isinstance(mixer, Gqa):
        # keys of fewer heads than ranks are repeated
        keys = math.lcm(mixer.num_key_value_heads, shape.context_parallel)
        return 2 * 2 * (mixer.num_attention_heads + keys) * mixer.head_dim
    return 0
