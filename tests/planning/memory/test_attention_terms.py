"""What attention's backward pass takes, in a ring and of gathered latents, beyond what the block of its layer held."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.models import load_facts
from hpcrl.models.layers import DenseMlp
from hpcrl.planning.memory.activations import expansion_bytes, ring_bytes
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.memory.trainer import trainer_peak


def test_a_ring_holds_what_travels() -> None:
    facts = load_facts("Qwen3-8B")
    memory = TrainerMemory(ranks=8, cp=8, micro_batch_tokens=131072, cp_scheme="ring", lm_head_chunk_tokens=1024)
    (layer,) = set(facts.layers)
    assert isinstance(layer.mlp, DenseMlp)
    narrow = replace(layer, mlp=replace(layer.mlp, intermediate_size=256))
    # 8 heads of keys and of values, three times in bfloat16 and twice in float32, and gradients of 32 heads of queries;
    # gate, up and product of the block were there before, and a gradient of one, and two of the residual
    travelling = 128 * (2 * 8 * (3 * 2 + 2 * 4) + 4 * 32)
    assert ring_bytes(narrow, memory.activations) == 16384 * (travelling - 2 * (4 * 256 + 2 * 4096))
    # the block of this model had more
    assert ring_bytes(layer, memory.activations) == 0
    assert trainer_peak(facts, memory).total == trainer_peak(facts, replace(memory, cp_scheme="ulysses")).total


def test_gathered_latents_are_kept_in_place_of_keys_and_values() -> None:
    facts = load_facts("DeepSeek-V3")
    memory = TrainerMemory(ranks=256, ep=32, cp=8, micro_batch_tokens=131072, cp_scheme="gather")
    dense = facts.layers[0]
    assert isinstance(dense.mlp, DenseMlp)
    narrow = replace(dense, mlp=replace(dense.mlp, intermediate_size=256))
    # of 128 heads: keys of 128 + 64 channels and values of 128; of all tokens 576 numbers; without what the block had
    made = 2 * 128 * (2 * 128 + 3 * 192 + 4 * 128) + (4 + 2) * 8 * 576
    assert expansion_bytes(narrow, memory.activations) == 16384 * (made - 2 * (4 * 256 + 2 * 7168))
    # eight experts a token had more
    assert expansion_bytes(facts.layers[-1], memory.activations) == 0
    assert trainer_peak(facts, memory).total < trainer_peak(facts, replace(memory, cp_scheme="ulysses")).total
