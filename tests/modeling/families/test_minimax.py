"""MiniMax-M2 agrees with transformers."""

import pytest
from model_agreement import assert_agreement, load_ours, save_model, write_config

MINIMAX = {
    "model_type": "minimax_m2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("changes", [{"rotary_dim": 4}, {"tie_word_embeddings": True}])
def test_minimax_m2_agrees(tmp_path, changes):
    model = assert_agreement(tmp_path, {**MINIMAX, **changes})
    assert model.arch.rotary_dim == changes.get("rotary_dim", 8)
    assert model.arch.facts.num_parameters() == sum(t.elements for t in model.arch.tensors())


def test_rotated_channels_as_published_configs_say_them(tmp_path):
    save_model(tmp_path, dict(MINIMAX))
    write_config(tmp_path, rope_parameters=None, rope_theta=1000.0, rotary_dim=6, num_mtp_modules=3)
    arch = load_ours(tmp_path).arch
    assert (arch.rotary_dim, arch.rope_theta) == (6, 1000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"use_qk_norm": False}, "use_qk_norm is False"),
        ({"attn_type_list": [1, 0]}, "attn_type_list has layers without full attention"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok (7) must be between 1 and num_local_experts (6)"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    save_model(tmp_path, dict(MINIMAX))
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        load_ours(tmp_path)
    assert message in str(caught.value)
