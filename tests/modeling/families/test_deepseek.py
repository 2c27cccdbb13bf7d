"""DeepSeek-V3, Kimi K2 and GLM-4.5 to 4.7 agree with transformers."""

import pytest
from model_agreement import assert_agreement, load_ours, save_model, write_config

MOE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "num_nextn_predict_layers": 0,
}
DEEPSEEK = {
    **MOE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 1e-5,
}
GLM = {
    **MOE,
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": YARN, "q_lora_rank": None},
        {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "tie_word_embeddings": True},
    ],
    ids=["plain", "yarn", "biased-tied"],
)
def test_deepseek_v3_agrees(tmp_path, changes):
    assert_agreement(tmp_path, {**DEEPSEEK, **changes})


@pytest.mark.parametrize("changes", [{}, {"use_qk_norm": True, "attention_bias": False, "n_group": 2}])
def test_glm4_moe_agrees(tmp_path, changes):
    assert_agreement(tmp_path, {**GLM, **changes})


def test_kimi_k2_is_deepseek_v3(tmp_path):
    """Its config has a ``model_type`` of its own, and `rope_scaling` in the form of earlier versions."""
    save_model(tmp_path, dict(DEEPSEEK))
    scaling = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}
    write_config(tmp_path, model_type="kimi_k2", rope_parameters=None, rope_scaling=scaling, rope_theta=50000.0)
    arch = load_ours(tmp_path).arch
    assert (arch.model_type, arch.rope_theta, arch.rope_scaling.factor) == ("kimi_k2", 50000.0, 32.0)
    assert arch.facts.num_parameters() == sum(t.elements for t in arch.tensors())


def test_the_correction_bias_is_not_a_parameter(tmp_path):
    save_model(tmp_path, dict(DEEPSEEK))
    model = load_ours(tmp_path)
    buffers = dict(model.named_buffers())
    assert set(buffers) == {f"layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    assert all(buffer.abs().max() > 0 and not buffer.requires_grad for buffer in buffers.values())
    assert not any("correction" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_group": 1}, "1 groups of 2 experts are too few to choose 3 from"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    save_model(tmp_path, dict(DEEPSEEK))
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        load_ours(tmp_path)
    assert message in str(caught.value)
