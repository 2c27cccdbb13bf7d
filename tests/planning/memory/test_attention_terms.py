"""Memory of attention's backward pass: plain, in a ring, of latents."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.models import load_facts
from hpcrl.models.layers import DenseMlp, Gqa, Layer
from hpcrl.planning.memory.activations import saved_bytes
from hpcrl.planning.memory.attention_backward import attention_memory, expansion_bytes, flash_bytes, ring_bytes
from hpcrl.planning.memory.flash_attention import accumulator_bytes
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.memory.trainer import trainer_moments, trainer_peak


def test_a_ring_holds_what_travels() -> None:
    facts = load_facts("Qwen3-8B")
    memory = TrainerMemory(ranks=8, cp=8, micro_batch_tokens=131072, cp_scheme="ring", lm_head_chunk_tokens=1024)
    (layer,) = set(facts.layers)
    assert isinstance(layer.mlp, DenseMlp)
    # 8 heads of keys and of values, three times in bfloat16 and twice in float32, and gradients of 32 heads of queries
    travelling = 128 * (2 * 8 * (3 * 2 + 2 * 4) + 4 * 32)
    # the kernel's accumulators: queries in float32 with a sum of each, keys and values of every head of queries
    travelling += 4 * 32 * (128 + 1) + 4 * 32 * 128
    assert ring_bytes(layer, memory.activations) == 16384 * travelling
    # and the gradient of the output, which ranks send nowhere: what exchanges heads keeps the output twice
    assert attention_memory(layer, memory.activations) == ("ring", 16384 * (travelling + 2 * 32 * 128))
    exchanged = replace(memory, cp_scheme="ulysses").activations
    assert saved_bytes(layer, exchanged) - saved_bytes(layer, memory.activations) == 16384 * 2 * 32 * 128
    # the block of this model takes more
    (backward,) = [m for m in trainer_moments(facts, memory) if m.name.startswith("backward")]
    assert backward["gradients of activations"].inputs["stage"] == "last matrix"
    narrow = replace(layer, mlp=replace(layer.mlp, intermediate_size=256))
    few = replace(facts, layers=(narrow,) * len(facts.layers))
    (backward,) = [m for m in trainer_moments(few, memory) if m.name.startswith("backward")]
    assert backward["keys and values in a ring"].value == 16384 * (travelling + 2 * 32 * 128)


def test_gathered_latents_are_kept_in_place_of_keys_and_values() -> None:
    facts = load_facts("DeepSeek-V3")
    memory = TrainerMemory(ranks=256, ep=32, cp=8, micro_batch_tokens=131072, cp_scheme="gather")
    dense = facts.layers[0]
    assert isinstance(dense.mlp, DenseMlp)
    # of 128 heads: keys of 128 + 64 channels and values of 128; of all tokens 576 numbers
    made = 2 * 128 * (2 * 128 + 3 * 192 + 4 * 128) + (4 + 2) * 8 * 576
    # the kernel's accumulator of queries
    made += 4 * 128 * (192 + 1)
    assert expansion_bytes(dense, memory.activations) == 16384 * made
    assert attention_memory(dense, memory.activations) == ("gathered latents", 16384 * (made + 2 * 128 * 128))
    assert trainer_peak(facts, memory).total < trainer_peak(facts, replace(memory, cp_scheme="ulysses")).total


def narrow_layer(model: str) -> Layer:
    layer = load_facts(model).layers[0]
    assert isinstance(layer.mlp, DenseMlp)
    return replace(layer, mlp=replace(layer.mlp, intermediate_size=256))


def test_flash_attention_adds_up_gradients_in_float32() -> None:
    """By the sizes of tensors in torch's ``mha_varlen_bwd``, written out."""
    memory, layer = TrainerMemory(ranks=8, micro_batch_tokens=16384), narrow_layer("Qwen3-8B")
    heads, key_heads, width = 32, 8, 128
    added = 4 * heads * width + 4 * heads
    expanded = 2 * 2 * heads * width
    gradients = 2 * (heads + 2 * key_heads) * width
    assert flash_bytes(layer, memory.activations) == 16384 * (added + expanded + gradients)
    # the gradient of the output is what the kernel reads
    wanted = 16384 * (added + expanded + gradients + 2 * heads * width)
    assert attention_memory(layer, memory.activations) == ("attention", wanted)
    # processors, float32 and heads that are too wide have other kernels
    for other in (replace(memory, device="cpu"), replace(memory, dtype="float32")):
        assert flash_bytes(layer, other.activations) == 0
    assert isinstance(layer.mixer, Gqa)
    assert flash_bytes(replace(layer, mixer=replace(layer.mixer, head_dim=264)), memory.activations) == 0
    # nor is it counted twice where latents are gathered, or where attention is sparse
    gathers = TrainerMemory(ranks=256, cp=8, micro_batch_tokens=131072, cp_scheme="gather")
    assert flash_bytes(narrow_layer("DeepSeek-V3"), gathers.activations) == 0
    assert flash_bytes(narrow_layer("GLM-5"), memory.activations) == 0


def test_latent_attention_pads_values_to_the_width_of_keys() -> None:
    memory = TrainerMemory(ranks=8, micro_batch_tokens=16384)
    # 128 heads of keys of 192 channels, values of 128: accumulators are as wide, as 192 is three times 64
    added, gradients, copies = 4 * 128 * (192 + 1), 3 * 2 * 128 * 192, 3 * 2 * 128 * 192
    found = flash_bytes(narrow_layer("DeepSeek-V3"), memory.activations)
    assert found == 16384 * (added + gradients + copies)


def test_a_deterministic_pass_has_several_accumulators_where_heads_are_few() -> None:
    """As many as there are multiprocessors of the GPU for a head; ranks that share heads have fewer heads each."""
    memory = TrainerMemory(ranks=8, cp=4, micro_batch_tokens=65536, deterministic=True)
    layer, usual = narrow_layer("Qwen3-8B"), replace(memory, deterministic=False)
    further = 4 * 16384 * 32 * 128
    # 8 heads here, of 32: 17 accumulators
    more = flash_bytes(layer, memory.activations) - flash_bytes(layer, usual.activations)
    assert more == 16 * further
    ring = replace(memory, cp_scheme="ring")
    assert ring_bytes(layer, ring.activations) - ring_bytes(layer, replace(ring, deterministic=False).activations) == (
        4 * further
    )
    assert accumulator_bytes(1, 2, 2, 72, deterministic=True) == 4 * 2 * (66 * 96 + 1)
    moments = {ledger.name: ledger for ledger in trainer_moments(load_facts("Qwen3-8B"), memory)}
    (backward,) = [ledger for name, ledger in moments.items() if name.startswith("backward")]
    # 8 heads on a rank and 17 accumulators of 4 bytes: more than the block of the layer
    assert "backward pass of attention" in {term.name for term in backward.terms}


def test_no_more_inputs_of_layers_are_under_way_than_there_are() -> None:
    facts = load_facts("Qwen3-8B")
    memory = TrainerMemory(
        ranks=8, micro_batch_tokens=8192, activation_checkpointing="full", activation_offload=True, accumulates=False
    )
    layer = 8192 * 4096 * 2

    def under_way(layers: int, bound: int) -> int:
        few = replace(facts, layers=facts.layers[:layers])
        moments = trainer_moments(few, replace(memory, offload_in_flight_bytes=bound))
        (logits,) = [ledger for ledger in moments if ledger.name == "logits"]
        return logits["activations in transfer"].value

    # the layer that is computed; and what is under way, at least one layer
    assert under_way(3, 1 << 30) == layer + 3 * layer
    assert under_way(20, 1 << 30) == layer + (1 << 30)
    assert under_way(20, 1) == layer + layer
