"""Nemotron 3 agrees with transformers, and its state space with the recurrence written token by token."""

import json
from itertools import pairwise

import pytest
import torch
from model_agreement import assert_agreement, load_ours, save_model, write_config

from hpcrl.modeling.recurrence import state_space
from hpcrl.modeling.recurrence.state_space import Scan, convolve, scan
from hpcrl.models.arch import arch_from_config
from hpcrl.models.known import find_config

NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": 32,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 28,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "mamba_num_heads": 6,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_latent_size": 12, "use_conv_bias": False},
        # steps of the recurrence are about 0.7: this limit holds for some of them
        # a convolution that sees one token, and experts whose rows are no multiple of 16 bytes
        {"conv_kernel": 1, "moe_latent_size": 10, "moe_intermediate_size": 22, "experts_implementation": "eager"},
        {"use_bias": True, "n_group": 2, "topk_group": 1, "time_step_min": 0.7},
    ],
    ids=["nano", "latent", "narrow", "biased-limited"],
)
def test_nemotron_agrees(tmp_path, changes):
    model = assert_agreement(tmp_path, {**NEMOTRON, **changes})
    assert model.arch.facts.num_parameters() == sum(t.elements for t in model.arch.tensors())
    assert model.arch.kv_layers == (2,)
    assert model.arch.state.layers == (0, 4)


@pytest.mark.parametrize("name", ["Nano-30B-A3B", "Super-120B-A12B"])
def test_published_configs_are_read_and_written(name):
    published = json.loads(find_config(f"NVIDIA-Nemotron-3-{name}-BF16").read_text())
    arch = arch_from_config(published)
    assert arch_from_config(arch.to_hf_config()) == arch
    assert arch.facts.layers == arch_from_config(published).facts.layers
    assert len(arch.kv_layers) == published["hybrid_override_pattern"].count("*")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        # transformers has a head of its own all the same
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"layers_block_type": ["mamba", "retention"]}, "layers_block_type has 'retention'"),
        ({"n_groups": 4}, "n_groups (4) must divide mamba_num_heads (6)"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    save_model(tmp_path, dict(NEMOTRON))
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        load_ours(tmp_path)
    assert message in str(caught.value)


STARTS = [0, 9, 10, 23, 29]


def random_scan(dtype=torch.float64):
    draw = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=dtype).requires_grad_()

    tokens, heads = STARTS[-1], 4
    steps = torch.rand(tokens, heads, generator=draw, dtype=dtype).mul(0.5).requires_grad_()
    # from a state that is forgotten at once to one that outlasts every sequence
    decay = torch.tensor([-50.0, -2.0, -0.1, -1e-4], dtype=dtype, requires_grad=True)
    return Scan(normal(tokens, heads, 3), steps, decay, normal(tokens, 2, 5), normal(tokens, 2, 5))


def by_token(parts, before):
    """The recurrence as it is defined."""
    outputs, after = [], []
    for i, (begin, end) in enumerate(pairwise(STARTS)):
        state = before[i]
        for t in range(begin, end):
            key, query = (x[t].repeat_interleave(2, 0) for x in (parts.keys, parts.queries))
            written = (parts.steps[t, :, None] * parts.values[t])[..., None] * key[:, None]
            state = state * (parts.steps[t] * parts.decay).exp()[:, None, None] + written
            outputs.append((state * query[:, None]).sum(-1))
        after.append(state)
    return torch.stack(outputs), torch.stack(after)


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
@pytest.mark.parametrize("piece", [1, 1 << 30], ids=["one chunk at a time", "all together"])
def test_chunks_are_the_recurrence(chunk_size, piece, monkeypatch):
    monkeypatch.setattr(state_space, "_CHUNK_BYTES", piece)
    parts = random_scan()
    before = torch.randn(4, 4, 3, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = scan(Scan(*(part.float() for part in parts)), STARTS, chunk_size, before.float())
    expected = by_token(parts, before)
    # chunks are computed in float32
    close = {"rtol": 2e-5, "atol": 2e-5}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **close)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype) for x in expected]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(both, weights, strict=True)), tuple(parts))
        for both in (found, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_parts_of_a_sequence_go_on_where_they_ended():
    draw = torch.Generator().manual_seed(6)
    x, weight, bias = (torch.randn(shape, generator=draw) for shape in ((29, 7), (7, 1, 4), (7,)))
    whole, last = convolve(x, weight, bias, [0, 29])
    parts, before = [], None
    for begin, end in ((0, 2), (2, 3), (3, 29)):
        y, before = convolve(x[begin:end], weight, bias, [0, end - begin], before)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts), whole)
    assert torch.equal(before, last)
    assert torch.equal(last[0], x[-3:])
    scanned = random_scan(torch.float32)
    whole, last = scan(scanned, [0, 29], 4)
    parts, before = [], None
    for begin, end in ((0, 6), (6, 7), (7, 29)):
        piece = replace_tokens(scanned, slice(begin, end))
        y, before = scan(piece, [0, end - begin], 4, before)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(before, last, rtol=1e-4, atol=1e-5)


def replace_tokens(parts, own):
    return Scan(parts.values[own], parts.steps[own], parts.decay, parts.keys[own], parts.queries[own])


@pytest.mark.parametrize(("chunk_size", "chunks", "wide"), [(4, 10, 5), (9, 5, 9)])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_pairs_and_keys_of_chunks_that_are_computed_at_a_time_fit_in_the_bytes_for_them(
    chunk_size, chunks, wide, pieces, monkeypatch
):
    """Three float32 for each head, token of a chunk, and its pairs or numbers of a key, whichever are more."""
    sizes, written = [], state_space._written

    def noted(parts):
        sizes.append(len(parts.values))
        return written(parts)

    monkeypatch.setattr(state_space, "_written", noted)
    of_a_chunk = 12 * 4 * chunk_size * wide
    monkeypatch.setattr(state_space, "_CHUNK_BYTES", pieces * of_a_chunk + of_a_chunk - 1)
    with torch.no_grad():
        scan(random_scan(torch.float32), STARTS, chunk_size)
    full, rest = divmod(chunks, pieces)
    assert sizes == [pieces] * full + [rest] * (rest > 0)
