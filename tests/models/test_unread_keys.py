"""Keys of a config.json that nothing reads: the tables, against config classes of transformers and published shapes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from test_defaults import CLASS_OF, small

from hpcrl.models.arch import ARCHS, arch_from_config
from hpcrl.models.configfile import read_config
from hpcrl.models.families import FAMILIES, facts_from_config
from hpcrl.models.known import find_config, known_models
from hpcrl.models.unread import read_keys, unread_keys, unread_note

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

TRAINED = sorted(kind for arch in ARCHS for kind in arch.MODEL_TYPES)
#: what stands in files beside sizes, of several publishers and versions of transformers
BESIDE: dict[str, Any] = {
    "architectures": ["X"],
    "auto_map": {"AutoConfig": "configuration_x.XConfig"},
    "transformers_version": "4.51.0",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "sep_token_id": None,
    "image_token_id": 9,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "pretraining_tp": 1,
    "clip_qkv": None,
    "router_aux_loss_coef": 0.001,
    "temperature": 0.6,
    "id2label": {"0": "LABEL_0"},
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
}
#: as published, by family
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3": {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None},
    "qwen2": {"max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "use_mrope": False},
    # of SmolLM2, and of Llama 3 in a hub's own format
    "llama": {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    "mistral": {"sliding_window": None},
    "deepseek_v3": {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1, "head_dim": 64},
    "minimax_m2": {"mtp_transformer_layers": 1, "num_mtp_modules": 3, "use_mtp": True, "attn_type_list": [1] * 4},
    "nemotron_h": {
        "expand": 2,
        "hidden_dropout": 0.0,
        "mamba_proj_bias": False,
        "num_logits_to_keep": 1,
        "norm_eps": 1e-5,
        "residual_in_fp32": False,
        "time_step_limit": [0.0, float("inf")],
        "use_mamba_kernels": True,
        "rescale_prenorm_residual": True,
        "mamba_ssm_cache_dtype": "float32",
        "rope_theta": 10000,
        "partial_rotary_factor": 1.0,
    },
    "gpt_oss": {"initial_context_length": 4096, "experts_per_token": 2, "quantization_config": None},
}


def config_of(kind: str) -> dict[str, Any]:
    """Sizes that the family has, in the judgement of transformers' class."""
    theirs = transformers.AutoConfig.for_model(CLASS_OF.get(kind, kind))
    found = small(CLASS_OF.get(kind, kind)) | {"model_type": kind}
    if kind in ("deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"):
        found |= {"head_dim": 8, "num_key_value_heads": 4}
    return {key: value for key, value in found.items() if hasattr(theirs, key) or key == "hybrid_override_pattern"}


@pytest.mark.parametrize("name", known_models())
def test_shipped_configs_have_none(name: str) -> None:
    assert unread_keys(read_config(find_config(name))) == ()


@pytest.mark.parametrize("kind", TRAINED)
def test_published_shapes_and_our_own_have_none(kind: str) -> None:
    config = {**config_of(kind), **BESIDE, **PUBLISHED.get(kind, {})}
    if kind == "nemotron_h":
        config["mlp_hidden_act"] = "relu2"
    assert unread_keys(config) == ()
    assert unread_note(config) is None
    assert unread_keys(arch_from_config(config_of(kind)).to_hf_config()) == ()


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_field_of_transformers_is_in_a_table(kind: str) -> None:
    """A field that a later transformers adds is unknown until somebody has looked at it."""
    theirs = transformers.AutoConfig.for_model(CLASS_OF.get(kind, kind)).to_dict()
    assert unread_keys({**theirs, "model_type": kind}) == ()
    assert len(theirs) > 30


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_others_are_named_at_any_depth(kind: str) -> None:
    strange = {
        "attn_logit_softcapping": 50.0,
        "vision_config": {"depth": 3},
        "clip_qkv": 8.0,
        "pretraining_tp": 2,
        "attention_dropout": 0.1,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": {"a": 1}},
    }
    wanted = {*strange} - {"quantization_config"}
    wanted |= {"quantization_config.activation_scheme", "quantization_config.kv_cache_scheme"}
    if kind != "nemotron_h":
        # its attention has no positions
        strange["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0, "attn_factor": 0.5, "mrope_section": [1]}
        wanted |= {"rope_scaling.attn_factor", "rope_scaling.mrope_section"}
    if kind.startswith("qwen3_5"):
        # all sections have the same positions of text
        wanted -= {"rope_scaling.mrope_section"}
    assert set(unread_keys({**config_of(kind), **strange})) == wanted
    inside = {"model_type": "mine", "text_config": {**config_of(kind), **strange}, "audio_config": {}}
    assert set(unread_keys(inside)) == {"audio_config", *(f"text_config.{key}" for key in wanted)}


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("qwen3", "partial_rotary_factor", 0.5),
        ("qwen2", "use_mrope", True),
        ("llama", "rope_interleaved", True),
        ("mistral", "max_window_layers", 2),
        ("qwen3_moe", "scoring_func", "sigmoid"),
        ("qwen3_moe", "n_shared_experts", 1),
        ("qwen3_moe", "pretraining_tp", True),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "partial_rotary_factor", 0.5),
        ("deepseek_v3", "index_topk", 64),
        ("glm_moe_dsa", "num_experts", 3),
        ("glm4_moe", "sliding_window", 128),
        ("gpt_oss", "swiglu_beta", 1.0),
        ("minimax_m2", "mtp_transformer_layers", 2),
        ("nemotron_h", "norm_eps", 1e-6),
        ("nemotron_h", "residual_in_fp32", True),
        ("nemotron_h", "time_step_limit", [0.0, 0.5]),
        ("nemotron_h", "first_k_dense_replace", 1),
    ],
)
def test_a_value_that_would_compute_something_else(kind: str, key: str, value: Any) -> None:
    assert unread_keys({**config_of(kind), key: value}) == (key,)
    assert unread_keys({**config_of(kind), key: None}) == ()


#: values to try for a key that is said to be read: other than every default
PROBES = (
    0.25,
    3,
    5,
    6,
    8,
    24,
    0,
    True,
    False,
    "float16",
    "own",
    [1],
    ["full_attention"] * 4,
    ["moe"] * 4,
    {"a": 1},
)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_key_documented_as_read_is_read(kind: str) -> None:
    """Some value of it gives another architecture, other facts, or an error."""

    def outcome(config: dict[str, Any]) -> Any:
        try:
            return arch_from_config(config), facts_from_config(config, name="x")
        except ValueError as error:
            return str(error)

    base = {**config_of(kind), "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    # in another place, by the group, or computed from the sizes beside it
    elsewhere = {"original_max_position_embeddings", "num_key_value_heads", "intermediate_size"}
    plain = outcome(base)
    assert not isinstance(plain, str), plain
    for key in read_keys(kind) - elsewhere:
        assert any(outcome({**base, key: value}) != plain for value in PROBES), key


def test_the_note_is_one_sentence_of_bounded_length() -> None:
    note = unread_note({**config_of("qwen3"), **{f"x{i}": 1 for i in range(500)}, "y" * 10_000: 1})
    assert note is not None
    assert len(note) < 1_000
    assert "x0" in note
    assert "and " in note


@pytest.mark.parametrize(
    "config", [{}, {"model_type": None}, {"model_type": ["a"]}, {"model_type": "qwen3", "text_config": 3}]
)
def test_strange_configs_are_no_error(config: dict[str, Any]) -> None:
    assert unread_keys(config) in ((), ("text_config",))
