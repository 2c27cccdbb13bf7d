"""GLM-5 agrees with transformers, and its sparse attention with attention that has a mask."""

import pytest
import torch
from model_agreement import assert_agreement, load_ours, loss_of, packed_logits, save_model, token_ids, write_config
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.modeling.attention.sparse import attend_chosen, choose_tokens
from hpcrl.modeling.sparse_kernels import reference
from hpcrl.modeling.sparse_kernels.kernel import Chosen

GLM = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    # so many heads that no score is 0, of which transformers would choose any
    "index_n_heads": 16,
    "index_head_dim": 10,
    "index_topk": 4,
}
SHARED = ["full", "shared", "full", "shared"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"indexer_types": SHARED, "attention_bias": True},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1, "index_topk": 1, "tie_word_embeddings": True},
        {"index_topk": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ],
    ids=["plain", "shared-biased", "every-third-tied", "all-tokens"],
)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 26])
def test_glm5_agrees(tmp_path, changes, chunk_bytes, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_BYTES", chunk_bytes)
    model = assert_agreement(tmp_path, {**GLM, **changes})
    kinds = {"indexer_types": SHARED, "index_topk_freq": ["full", "shared", "shared", "full"]}
    assert list(model.arch.indexer_types) == kinds.get(next(iter(changes), ""), ["full"] * 4)
    indexers = {name for name, _ in model.named_parameters() if ".indexer.wk." in name}
    assert len(indexers) == model.arch.indexer_types.count("full")
    assert model.arch.facts.num_parameters() == sum(t.elements for t in model.arch.tensors())


def test_sharing_is_by_layer(tmp_path):
    """A layer that is computed again for the backward pass shares what it shared before."""
    save_model(tmp_path, {**GLM, "indexer_types": SHARED})
    plain, again = load_ours(tmp_path), load_ours(tmp_path)
    for block in again.layers:
        forward = block.forward
        block.forward = lambda *a, forward=forward: torch.utils.checkpoint.checkpoint(forward, *a, use_reentrant=False)
    for model in (plain, again):
        loss_of(packed_logits(model, token_ids())).backward()
    for (name, own), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None) == (".indexer." in name)
        assert own.grad is None or torch.equal(own.grad, other.grad)


def masked_attention(q, rows, chosen, value_dim, scale):
    """With a score for every pair."""
    allowed = torch.zeros(len(q), len(rows) + 1, dtype=torch.bool).scatter_(1, chosen.long() % (len(rows) + 1), True)
    scores = torch.einsum("thd,sd->ths", q, rows) * scale
    scores = scores.masked_fill(~allowed[:, None, :-1], float("-inf"))
    return scores.softmax(-1) @ rows[:, :value_dim]


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 16])
def test_attention_over_chosen_rows_is_attention_with_a_mask(chunk_bytes, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_BYTES", chunk_bytes)
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((30, 3, 7), (40, 7))]
    chosen = torch.stack([torch.randperm(40, generator=draw)[:9] for _ in range(30)])
    chosen[:, 6:][torch.rand(30, 3, generator=draw) < 0.4] = -1
    weight = torch.randn(30, 3, 5, generator=draw, dtype=torch.float64)
    gradients = []
    for attend in (masked_attention, lambda *inputs: attend_chosen(Chosen(*inputs))):
        q, rows = (tensor.clone().requires_grad_() for tensor in made)
        out = attend(q, rows, chosen.int(), 5, 0.3)
        (out * weight).sum().backward()
        gradients.append((out.detach(), q.grad, rows.grad))
    for own, other in zip(*gradients, strict=True):
        # sums and gradients of rows are float32 within
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_of_equal_scores_the_first_are_chosen():
    q, weights = torch.ones(3, 1, 2), torch.ones(3, 1)
    k = torch.tensor([[1.0, 1], [-1, -1], [2, 2], [1, 1], [0, 0], [-3, 0], [1, 1], [2, 2]])
    # scores 2 0 4 2 0 0 2 4: of keys below zero none is less than another
    best = choose_tokens(q, k, weights, torch.tensor([8, 6, 2]), 4)
    assert best.tolist() == [[0, 2, 3, 7], [0, 1, 2, 3], [0, 1, -1, -1]]
    assert choose_tokens(q * torch.nan, k, weights, torch.tensor([8, 6, 2]), 3).tolist() == [
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, -1],
    ]


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that is made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
        return result


def test_no_tensor_has_all_pairs_of_tokens(monkeypatch):
    tokens, width, heads, dim = 1024, 16, 2, 8
    monkeypatch.setattr(reference, "_CHUNK_BYTES", 1 << 16)
    draw = torch.Generator().manual_seed(0)
    q, rows = torch.randn(tokens, heads, dim, generator=draw), torch.randn(tokens, dim, generator=draw)
    weights, visible = torch.randn(tokens, heads, generator=draw), torch.arange(tokens) + 1
    with Largest() as largest:
        chosen = choose_tokens(q, rows, weights, visible, width)
        out = attend_chosen(Chosen(q.requires_grad_(), rows.requires_grad_(), chosen, 4, 0.3))
        out.sum().backward()
    assert largest.elements <= tokens * width < tokens * tokens / 32
    assert rows.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "begins with 'shared'"),
        ({"indexer_types": ["full"]}, "indexer_types names 1 layers, num_hidden_layers is 4"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "indexer_types has 'half'"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"index_head_dim": 4}, "index_head_dim (4) is less than the qk_rope_head_dim (6)"),
        ({"rope_interleave": False}, "rope_interleave is False; this model computes True"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    save_model(tmp_path, dict(GLM))
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        load_ours(tmp_path)
    assert message in str(caught.value)
