"""A config.json that no model can have is an error with the key, never a traceback and never a silent number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hpcrl.models
from hpcrl.models import known_models, load_facts

_SHIPPED = Path(hpcrl.models.__file__).parent / "configs"
CONFIGS = {name: json.loads((_SHIPPED / f"{name}.json").read_text()) for name in known_models()}
MISSING = "missing from the file"

#: model, what is changed, and what the message says
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(
        (model, {key: value}, key)
        for model, key in [
            ("Qwen3-8B", "hidden_size"),
            ("Qwen3-8B", "num_hidden_layers"),
            ("Qwen3-8B", "num_attention_heads"),
            ("Qwen3-30B-A3B", "num_experts"),
            ("Qwen3-30B-A3B", "moe_intermediate_size"),
            ("GLM-5", "kv_lora_rank"),
            ("GLM-5", "index_topk"),
            ("GLM-5", "num_nextn_predict_layers"),
            ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "mamba_num_heads"),
        ]
        for value in (-1, 2.5, "64", [64], {"a": 1}, True, 10**12)
    ),
    *(
        (model, {key: MISSING}, key)
        for model, key in [
            ("Qwen3-8B", "vocab_size"),
            ("Qwen3-8B", "intermediate_size"),
            ("Qwen3-30B-A3B", "num_experts_per_tok"),
            ("GLM-5", "v_head_dim"),
            ("GLM-5", "kv_lora_rank"),
            ("DeepSeek-V3", "moe_intermediate_size"),
            ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "ssm_state_size"),
        ]
    ),
    ("gpt-oss-20b", {"intermediate_size": MISSING}, "lacks intermediate_size"),
    ("gpt-oss-20b", {"sliding_window": 0}, "sliding_window is 0"),
    ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "full_attention and sliding_attention"),
    ("Qwen3-Next-80B-A3B-Instruct", {"linear_num_value_heads": 24}, "not a multiple of linear_num_key_heads (16)"),
    ("Qwen3-Next-80B-A3B-Instruct", {"linear_key_head_dim": 0.5}, "linear_key_head_dim is 0.5"),
    ("Qwen3-Next-80B-A3B-Instruct", {"mamba_ssm_dtype": "int4"}, "mamba_ssm_dtype is 'int4'"),
    ("Qwen3-Next-80B-A3B-Instruct", {"layer_types": ["sliding_attention"] * 48}, "full_attention and linear_attention"),
    ("MiniMax-M2", {"attn_type_list": [1] * 61 + [0]}, "attn_type_list has 0"),
    *(
        (
            "Llama-4-Scout-17B-16E-Instruct",
            {"text_config": {**CONFIGS["Llama-4-Scout-17B-16E-Instruct"]["text_config"], **c}},
            says,
        )
        for c, says in [
            ({"moe_layers": [48]}, "moe_layers has 48"),
            ({"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers"),
            ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
            ({"attention_chunk_size": -1}, "attention_chunk_size is -1"),
        ]
    ),
    ("Qwen3-8B", {"hidden_size": 0}, "hidden_size is 0"),
    ("Qwen3-8B", {"num_key_value_heads": 7}, "not a multiple of num_key_value_heads (7)"),
    ("Qwen3-8B", {"head_dim": MISSING, "hidden_size": 4100}, "hidden_size (4100) is not a multiple"),
    ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "more than the 128 of num_experts"),
    ("GLM-5", {"num_experts_per_tok": 257}, "more than the 256 of n_routed_experts"),
    ("Qwen3-8B", {"layer_types": ["linear_attention"] * 36}, "linear_attention; known of qwen3 is full_attention"),
    ("Qwen3-8B", {"layer_types": ["sliding_attention"] * 36}, "sliding_attention"),
    ("Qwen3-8B", {"layer_types": ["full_attention"] * 35}, "names 35 layers"),
    ("Qwen3-8B", {"layer_types": "full_attention"}, "not a list"),
    ("Qwen3-8B", {"use_sliding_window": True}, "sliding window"),
    ("Qwen3-8B", {"tie_word_embeddings": "no"}, "not true or false"),
    ("Qwen3-8B", {"dtype": "int3"}, "dtype is 'int3'"),
    ("Qwen3-8B", {"dtype": 16}, "dtype is 16"),
    ("Qwen3-30B-A3B", {"mlp_only_layers": [48]}, "mlp_only_layers has 48"),
    ("Qwen3-30B-A3B", {"mlp_only_layers": ["0"]}, "mlp_only_layers has '0'"),
    ("Qwen3-30B-A3B", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ("GLM-5", {"mlp_layer_types": ["dense"] * 3}, "names 3 layers"),
    ("GLM-5", {"mlp_layer_types": ["thick"] * 78}, "'thick'"),
    ("GLM-5", {"indexer_types": ["full"] * 77}, "names 77 layers"),
    ("GLM-5", {"indexer_types": ["half"] * 78}, "'half'"),
    ("GLM-5", {"model_type": "glm_6"}, "model_type is 'glm_6'"),
    ("GLM-5", {"model_type": MISSING}, "model_type is None"),
    ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern has 'X'"),
    # what no size is: how weights are stored, numbers, groups of experts, token ids
    *(
        ("Qwen3-8B", {"quantization_config": value}, says)
        for value, says in [
            ({"quant_method": "awq"}, "quant_method 'awq'; known is block FP8"),
            ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors'"),
            ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
            ({"bits": 4}, "quant_method None"),
            ({"quant_method": "fp8"}, "weight_block_size None"),
            ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size [64, 64]"),
            ("awq", "quantization_config is 'awq', not an object"),
        ]
    ),
    *(
        ("Qwen3-8B", {"rms_norm_eps": value}, says)
        for value, says in [
            (-1, "rms_norm_eps is -1; it must be above 0"),
            (0, "rms_norm_eps is 0"),
            (2, "and 1 at most"),
            ("1e-6", "not a number"),
            (True, "not a number"),
            ([1e-6], "not a number"),
        ]
    ),
    ("Qwen3-8B", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ("Qwen3-8B", {"rope_theta": 0}, "rope_theta is 0"),
    ("Qwen3-8B", {"rope_theta": "1e6"}, "rope_theta is '1e6'"),
    ("Qwen3-8B", {"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not an object"),
    ("Qwen3-8B", {"rope_scaling": {"rope_type": "yarn", "factor": -4}}, "factor of rope_scaling"),
    (
        "Qwen3-8B",
        {"rope_parameters": {"rope_theta": "much"}},
        "rope_theta of rope_scaling or rope_parameters is 'much'",
    ),
    ("Qwen3-8B", {"rope_parameters": [1]}, "rope_parameters is [1], not an object"),
    ("Qwen3-8B", {"head_dim": 127}, "head_dim is 127; rotary embeddings turn pairs"),
    ("DeepSeek-V3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
    ("GLM-4.7", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ("Qwen3-8B", {"initializer_range": -0.02}, "initializer_range is -0.02; it must be from 0"),
    ("Qwen3-8B", {"attention_dropout": 2}, "attention_dropout is 2"),
    ("Qwen3-8B", {"hidden_act": 3}, "hidden_act is 3, not text"),
    ("Qwen3-8B", {"is_encoder_decoder": True}, "a model with an encoder"),
    ("Qwen3-8B", {"eos_token_id": 151936}, "eos_token_id is 151936; tokens are 0 to 151935"),
    ("Qwen3-8B", {"eos_token_id": [151645, 200000]}, "eos_token_id is 200000"),
    ("Qwen3-8B", {"eos_token_id": -1}, "eos_token_id is -1"),
    ("Qwen3-8B", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ("Qwen3-30B-A3B", {"norm_topk_prob": 1}, "norm_topk_prob is 1, not true or false"),
    ("Qwen3-30B-A3B", {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef is -0.1"),
    ("GLM-5", {"n_group": 7}, "n_group is 7, which does not divide the 256 experts"),
    ("GLM-5", {"n_group": 0}, "n_group is 0"),
    ("DeepSeek-V3", {"n_group": 8, "topk_group": 9}, "topk_group is 9, more than the 8 of n_group"),
    ("DeepSeek-V3", {"n_group": 64, "topk_group": 1}, "more than the 4 experts of topk_group groups"),
    ("GLM-5", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
    ("GLM-5", {"first_k_dense_replace": 79}, "more than the 78 of num_hidden_layers"),
    ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; known is 1"),
    ("GLM-5", {"indexer_types": ["shared"] * 78}, "indexer_types begins with 'shared'"),
    ("GLM-5", {"index_topk_pattern": "S" * 78}, "index_topk_pattern begins with 'S'"),
    ("GLM-5", {"index_topk_pattern": "F" + "x" * 77}, "index_topk_pattern has 'x'"),
    ("gpt-oss-20b", {"experts_per_token": 33, "num_experts_per_tok": MISSING}, "experts_per_token is 33"),
    ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"n_groups": 7}, "mamba_num_heads (64) is not a multiple of n_groups (7)"),
]


def test_what_published_configs_say_is_taken(tmp_path: Path) -> None:
    """Beside sizes, as Hugging Face has them."""
    said: list[tuple[str, dict[str, Any]]] = [
        ("Qwen3-30B-A3B", {"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "rope_scaling": None, "hidden_act": "silu"}),
        ("Qwen3-8B", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
        ("Qwen3-8B", {"eos_token_id": [151645, 151643], "pad_token_id": -1, "attention_dropout": 0.0}),
        ("DeepSeek-V3", {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "moe_layer_freq": 1}),
        ("DeepSeek-V3", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "beta_fast": 32}}),
        ("GLM-5", {"n_group": 1, "topk_group": 1, "index_topk_pattern": "F" + "S" * 77}),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "mxfp4"}, "swiglu_limit": 7.0}),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"layer_norm_epsilon": 1e-5, "n_group": 1, "mlp_hidden_act": "relu2"}),
    ]
    for model, values in said:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[model], **values}))
        assert load_facts(tmp_path).num_parameters() > 0


@pytest.mark.parametrize(
    ("model", "change", "says"),
    WRONG,
    ids=[f"{i}-{model}-{'-'.join(change)}" for i, (model, change, _) in enumerate(WRONG)],
)
def test_an_impossible_config_is_one_error(tmp_path: Path, model: str, change: dict[str, Any], says: str) -> None:
    config = {**CONFIGS[model], **change}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value != MISSING}))
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        load_facts(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "3", '"qwen3"', "null", "{", "{}", '{"text_config": [1]}', "\xff"])
def test_what_is_not_a_config_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_facts(tmp_path)


@pytest.mark.parametrize("model", known_models())
def test_a_null_is_a_key_that_is_missing(tmp_path: Path, model: str) -> None:
    """Configs of transformers write null where a family has no such thing."""
    spare = {
        "index_topk_pattern": None,
        "mlp_layer_types": None,
        "moe_latent_size": CONFIGS[model].get("moe_latent_size"),
    }
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[model], **spare}))
    assert load_facts(tmp_path).num_parameters(mtp=True) == load_facts(model).num_parameters(mtp=True)


def test_queries_need_not_be_compressed(tmp_path: Path) -> None:
    plain = {**CONFIGS["DeepSeek-V3"], "q_lora_rank": None}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    names = {spec.name for spec in load_facts(tmp_path).tensors()}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.layers.0.self_attn.q_a_proj.weight" not in names
