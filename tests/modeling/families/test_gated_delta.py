"""Qwen3-Next and Qwen3.5 agree with transformers, and the gated delta rule with the rule written token by token."""

import json
from itertools import pairwise

import pytest
import torch
from model_agreement import assert_agreement, load_ours, packed_logits, save_model, token_ids, write_config

from hpcrl.modeling.recurrence import delta_rule as rule
from hpcrl.modeling.recurrence.delta_rule import DeltaRule, delta_rule
from hpcrl.models import load_facts
from hpcrl.models.arch import arch_from_config
from hpcrl.models.families import facts_from_config
from hpcrl.models.known import find_config

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
    "max_position_embeddings": 64,
    # what heads read of a state is normalised, and may be small: rounding must not decide
    "rms_norm_eps": 1e-2,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "intermediate_size": 40,
    **SIZES,
    **EXPERTS,
}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "intermediate_size": 40,
    **SIZES,
}
QWEN3_5_MOE = {
    "model_type": "qwen3_5_moe_text",
    **SIZES,
    **EXPERTS,
}

#: keys and queries are divided by their lengths, and so are their gradients: they must not be small
SPREAD = {"embed_tokens.weight": 1.0, "conv1d.weight": 1.0, "in_proj_qkvz.weight": 0.4, "in_proj_qkv.weight": 0.4}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # a dense layer, heads of keys and values in pairs, and a head that is the embedding
        {"mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_key_heads": 4, "tie_word_embeddings": True},
        # layers by list, a convolution that sees one token, half of the channels rotated, biases of attention
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 1,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "decoder_sparse_step": 2,
        },
    ],
    ids=["published", "dense-tied", "listed"],
)
def test_qwen3_next_agrees(tmp_path, changes):
    model = assert_agreement(tmp_path, {**QWEN3_NEXT, **changes}, SPREAD)
    assert model.arch.facts.num_parameters() == sum(t.elements for t in model.arch.tensors())
    assert model.arch.kv_layers == ((0, 3) if "layer_types" in changes else (1, 3))
    assert model.arch.state.recurrent == (4, 12, 8)


ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize("config", [QWEN3_5, QWEN3_5_MOE], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True}, "attention_bias": True}],
    ids=["plain", "sections"],
)
def test_qwen3_5_agrees(tmp_path, config, changes):
    model = assert_agreement(tmp_path, {**config, **changes}, SPREAD)
    assert model.arch.rotary_dim == 4


def test_no_state_crosses_from_one_sequence_to_the_next(tmp_path):
    save_model(tmp_path, dict(QWEN3_NEXT))
    model = load_ours(tmp_path)
    sequences = token_ids()
    with torch.no_grad():
        together = packed_logits(model, sequences).split([len(s) for s in sequences])
        for own, sequence in zip(together, sequences, strict=True):
            torch.testing.assert_close(own, packed_logits(model, [sequence]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B-Instruct", "Qwen3-Coder-Next"])
def test_published_configs_are_read_and_written(name):
    published = json.loads(find_config(name).read_text())
    arch = arch_from_config(published)
    assert arch_from_config(arch.to_hf_config()) == arch
    assert arch.facts.layers == load_facts(name).layers
    # 79.67 billion beside the module of multi-token prediction
    assert arch.num_parameters() == 79_674_391_296
    assert arch.kv_layers == tuple(range(3, 48, 4))
    assert arch.state.recurrent == (32, 128, 128)
    assert arch.state.conv == (3, 8192)
    assert arch.rotary_dim == 64


QWEN3_5_35B = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
}


def test_qwen3_5_has_the_parameters_of_its_name():
    facts = facts_from_config(QWEN3_5_35B, name="x")
    assert round(facts.num_parameters() / 1e9) == 35
    assert round(facts.active_parameters(embedding=False) / 1e9) == 3
    dense = {**QWEN3_5_35B, "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408}
    dense |= {"num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4}
    dense |= {"linear_num_value_heads": 48}
    assert round(facts_from_config(dense, name="x").num_parameters() / 1e9) == 27


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has sliding_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads (3) "),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.2}}, "rotates 3 channels"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    save_model(tmp_path, dict(QWEN3_NEXT))
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        load_ours(tmp_path)
    assert message in str(caught.value)


STARTS = [0, 9, 10, 23, 29]


def random_rule(dtype=torch.float64):
    draw = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=dtype).requires_grad_()

    tokens, heads = STARTS[-1], 4
    # from a state that is forgotten at once to one that outlasts every sequence
    scale = torch.tensor([50.0, 2.0, 0.1, 1e-4], dtype=dtype)
    decay = (-torch.rand(tokens, heads, generator=draw, dtype=dtype) * scale).requires_grad_()
    strength = torch.rand(tokens, heads, generator=draw, dtype=dtype).requires_grad_()
    return DeltaRule(normal(tokens, 2, 5), normal(tokens, 2, 5), normal(tokens, heads, 3), decay, strength)


def by_token(parts, before):
    """The rule as it is defined."""
    outputs, after = [], []

    def unit(x):
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    for i, (begin, end) in enumerate(pairwise(STARTS)):
        state = before[i]
        for t in range(begin, end):
            key, query = (unit(x[t]).repeat_interleave(2, 0) for x in (parts.keys, parts.queries))
            state = state * parts.decay[t].exp()[:, None, None]
            said = (key[..., None] * state).sum(1)
            correction = parts.strength[t, :, None] * (parts.values[t] - said)
            state = state + key[..., None] * correction[:, None]
            outputs.append((query[..., None] * state).sum(1) / 5**0.5)
        after.append(state)
    return torch.stack(outputs), torch.stack(after)


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
@pytest.mark.parametrize("piece", [1, 1 << 30], ids=["one chunk at a time", "all together"])
def test_chunks_are_the_rule(chunk_size, piece, monkeypatch):
    monkeypatch.setattr(rule, "_CHUNK_BYTES", piece)
    parts = random_rule()
    before = torch.randn(4, 4, 5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = delta_rule(DeltaRule(*(part.float() for part in parts)), STARTS, chunk_size, before.float())
    expected = by_token(parts, before)
    # chunks are computed in float32
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype) for x in expected]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(both, weights, strict=True)), tuple(parts))
        for both in (found, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_parts_of_a_sequence_go_on_where_they_ended():
    parts = DeltaRule(*(part.detach() for part in random_rule(torch.float32)))
    whole, last = delta_rule(parts, [0, 29], 4)
    found, before = [], None
    for begin, end in ((0, 6), (6, 7), (7, 29)):
        y, before = delta_rule(DeltaRule(*(part[begin:end] for part in parts)), [0, end - begin], 4, before)
        found.append(y)
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(before, last, rtol=1e-4, atol=1e-5)


def test_a_chunk_takes_the_announced_bytes(monkeypatch):
    """Four float32 for each head, token of a chunk, and its pairs or numbers of a key or value, whichever are more."""
    sizes, solved = [], rule._solved

    def noted(parts):
        sizes.append(len(parts.values))
        return solved(parts)

    monkeypatch.setattr(rule, "_solved", noted)
    of_a_chunk = 16 * 4 * 4 * 5
    monkeypatch.setattr(rule, "_CHUNK_BYTES", 3 * of_a_chunk + of_a_chunk - 1)
    with torch.no_grad():
        delta_rule(random_rule(torch.float32), STARTS, 4)
    assert sizes == [3, 3, 3, 1]
