"""Qwen2, Llama and Mistral agree with transformers: forward, backward, and token by token."""

import json

import pytest
from model_agreement import VOCAB, assert_agreement, load_ours, save_model, write_config

from hpcrl.models.arch import arch_from_config
from hpcrl.models.families import facts_from_config
from hpcrl.models.known import find_config

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
QWEN2 = {
    "model_type": "qwen2",
    **SIZES,
}
LLAMA = {
    "model_type": "llama",
    **SIZES,
}
MISTRAL = {
    "model_type": "mistral",
    **SIZES,
    # sequences have up to 12 tokens
    "sliding_window": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"rope_parameters": YARN},
        # what published configs have beside an unused window
        {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1, "rms_norm_eps": 1e-5},
    ],
    ids=["plain", "tied", "yarn", "unused-window"],
)
def test_qwen2_agrees(tmp_path, changes):
    arch = assert_agreement(tmp_path, {**QWEN2, **changes}).arch
    biases = {t.name.rpartition("layers.0.")[2] for t in arch.tensors() if ".0." in t.name and t.name.endswith("bias")}
    assert biases == {f"self_attn.{part}_proj.bias" for part in "qkv"}
    assert arch_from_config(arch.to_hf_config()) == arch


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": None},
        {"attention_bias": True, "head_dim": 12},
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}},
        # heads of SmolLM2: nine of queries on three of keys
        {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ],
    ids=["llama-2", "biased-wide-heads", "llama-3.2", "linear", "smollm2"],
)
def test_llama_agrees(tmp_path, changes):
    arch = assert_agreement(tmp_path, {**LLAMA, **changes}).arch
    assert arch.num_key_value_heads == (changes.get("num_key_value_heads", 2) or 4)
    assert arch_from_config(arch.to_hf_config()) == arch


@pytest.mark.parametrize("changes", [{}, {"sliding_window": None, "head_dim": 12}, {"tie_word_embeddings": True}])
def test_mistral_agrees(tmp_path, changes):
    arch = assert_agreement(tmp_path, {**MISTRAL, **changes}).arch
    assert arch.window(1) == {**MISTRAL, **changes}["sliding_window"]
    assert arch_from_config(arch.to_hf_config()) == arch


def test_a_window_that_a_config_leaves_out_is_that_of_transformers():
    config = {**MISTRAL, "vocab_size": VOCAB}
    del config["sliding_window"]
    assert arch_from_config(config).window(0) == 4096
    assert arch_from_config({**config, "sliding_window": None}).window(0) is None


@pytest.mark.parametrize(
    ("config", "heads"), [(LLAMA, 64), (QWEN2, 32), (MISTRAL, 8)], ids=["llama", "qwen2", "mistral"]
)
def test_heads_of_keys_that_a_config_leaves_out_are_those_of_transformers(config, heads):
    from transformers import AutoConfig

    sizes = {**config, "vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 64, "head_dim": 2}
    del sizes["num_key_value_heads"]
    assert arch_from_config(sizes).num_key_value_heads == heads
    assert AutoConfig.for_model(**sizes).num_key_value_heads == heads
    assert (
        facts_from_config(sizes, name=arch_from_config(sizes).model_type).layers == arch_from_config(sizes).facts.layers
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Qwen2.5-7B-Instruct", {"gqa"}),
        ("Llama-3.1-8B-Instruct", {"gqa"}),
        ("Mistral-7B-v0.1", {"gqa+window"}),
        ("Mistral-7B-Instruct-v0.3", {"gqa"}),
        ("SmolLM2-135M-Instruct", {"gqa"}),
    ],
)
def test_published_configs_are_read_and_written(name, kinds):
    arch = arch_from_config(json.loads(find_config(name).read_text()))
    assert set(arch.facts.attention_kinds) == kinds
    assert arch_from_config(arch.to_hf_config()) == arch
    assert (arch.rope_scaling is not None) == name.startswith("Llama-3")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN2, {"use_sliding_window": True}, "sliding windows (use_sliding_window) are not supported"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        (QWEN2, {"attention_bias": False}, "attention_bias is False; this model computes True"),
        (QWEN2, {"head_dim": None}, "head_dim is null"),
        (QWEN2, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "known are default, linear, llama3, yarn"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "rope_type": "longrope"}}, "rope_type is 'longrope'"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias is True; this model computes False"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; this model computes 'silu'"),
        (LLAMA, {"hidden_size": 34, "head_dim": 8}, "hidden_size (34) is not a multiple of num_attention_heads (4)"),
        (MISTRAL, {"attention_bias": True}, "attention_bias is True; this model computes False"),
        (MISTRAL, {"num_key_value_heads": None}, "num_key_value_heads is null"),
        (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types and sliding_window are both set"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, config, changes, message):
    save_model(tmp_path, dict(config))
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        load_ours(tmp_path)
    assert message in str(caught.value)
