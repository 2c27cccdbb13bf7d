"""Qwen3, dense and with experts, agrees with transformers."""

import pytest
from model_agreement import assert_agreement

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SPARSE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "attention_bias": True},
        {"rope_parameters": YARN},
        {"rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.3}},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}},
    ],
    ids=["plain", "tied-biased", "yarn", "yarn-untruncated", "llama3", "linear"],
)
def test_dense_models_agree(tmp_path, changes):
    assert_agreement(tmp_path, {**DENSE, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp_only_layers": [1], "attention_bias": True},
        {"decoder_sparse_step": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
        # rows of no multiple of 16 bytes, which grouped products of torch refuse
        {"hidden_size": 30, "moe_intermediate_size": 13, "experts_implementation": "eager"},
    ],
    ids=["sparse", "dense-layer-biased", "every-second-tied", "odd-widths"],
)
def test_sparse_models_agree(tmp_path, changes):
    model = assert_agreement(tmp_path, {**SPARSE, **changes})
    sparse = [layer for layer in range(3) if model.arch.is_sparse(layer)]
    assert sparse == {"mlp_only_layers": [0, 2], "decoder_sparse_step": [1]}.get(next(iter(changes), ""), [0, 1, 2])
