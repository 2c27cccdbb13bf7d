"""gpt-oss agrees with transformers."""

import json

import pytest
from model_agreement import assert_agreement, load_ours, save_model, write_config

from hpcrl.models.arch import arch_from_config
from hpcrl.models.known import find_config

GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    # sequences have up to 12 tokens
    "sliding_window": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # most gates and ups are beyond such a limit
        {"swiglu_limit": 0.3, "swiglu_alpha": 1.2, "tie_word_embeddings": True},
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ],
    ids=["plain", "clamped-tied", "full-first"],
)
def test_gpt_oss_agrees(tmp_path, changes):
    model = assert_agreement(tmp_path, {**GPT_OSS, **changes})
    arch = model.arch
    assert arch.facts.num_parameters() == sum(t.elements for t in arch.tensors())
    assert (arch.rope_scaling is None) == ("rope_parameters" in changes)
    assert arch_from_config(arch.to_hf_config()) == arch


def test_the_published_config_is_read():
    arch = arch_from_config(json.loads(find_config("gpt-oss-20b").read_text()))
    assert (arch.rope_scaling.rope_type, arch.rope_scaling.truncate) == ("yarn", False)
    assert [arch.window(layer) for layer in range(3)] == [128, None, 128]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "its experts are stored in fp8"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "has 'chunked_attention'"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok (7) must be between 1 and num_local_experts (6)"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    save_model(tmp_path, dict(GPT_OSS))
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        load_ours(tmp_path)
    assert message in str(caught.value)
