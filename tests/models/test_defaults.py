"""What a config.json leaves out means what transformers takes it to mean, to trainer, engine and planner alike."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpcrl.models.arch import ARCHS, ModelArch, arch_from_config, load_arch
from hpcrl.models.configfile import read_config
from hpcrl.models.defaults import ALIASES, DEFAULTS, completed
from hpcrl.models.families import FAMILIES, facts_from_config
from hpcrl.models.known import find_config, known_models

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

#: kimi_k2 is a name that transformers does not know, of DeepSeek-V3's classes
CLASS_OF = {"kimi_k2": "deepseek_v3"}
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), "num_experts"),
    "gpt_oss": "num_local_experts",
    "minimax_m2": "num_local_experts",
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm_moe_dsa", "nemotron_h"), "n_routed_experts"),
}


def small(kind: str) -> dict[str, Any]:
    """A config with the sizes that readers want, and nothing else."""
    config = {"model_type": kind, **COMMON}
    if kind in EXPERTS:
        config[EXPERTS[kind]] = 64
    if kind in ("deepseek_v3", "glm_moe_dsa"):
        config |= LATENT
    if kind == "nemotron_h":
        config |= {
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "moe_shared_expert_intermediate_size": 16,
        }
        config |= {"hybrid_override_pattern": "M*E-"}
        del config["sliding_window"]
    if kind in ("qwen3_next", "qwen3_5_moe_text"):
        config["shared_expert_intermediate_size"] = 16
    if kind in ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        del config["sliding_window"]
    return config


def theirs(kind: str, config: Mapping[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**{**config, "model_type": CLASS_OF.get(kind, kind)})


@pytest.mark.parametrize("kind", sorted(DEFAULTS))
def test_the_table_is_that_of_transformers(kind: str) -> None:
    own = transformers.AutoConfig.for_model(CLASS_OF.get(kind, kind))
    rope = getattr(own, "rope_parameters", None) or {}
    for key, value in DEFAULTS[kind].items():
        found = rope.get(key, getattr(own, key, None)) if key == "rope_theta" else getattr(own, key, None)
        assert found == value, key


@pytest.mark.parametrize("kind", [arch.MODEL_TYPES[0] for arch in ARCHS])
def test_every_field_of_a_config_that_leaves_all_out(kind: str) -> None:
    """Fields that transformers' class has too, one by one."""
    arch, other = arch_from_config(small(kind)), theirs(kind, small(kind))
    ids = {"model_type", "bos_token_id", "eos_token_id", "pad_token_id"}
    compared = 0
    for field in fields(arch):
        # layers by kind are spelled in other words; modules of multi-token prediction are those of the checkpoint
        if field.name in ids | {
            "layers_block_type",
            "mtp_layers_block_type",
            "num_nextn_predict_layers",
            "rope_scaling",
        }:
            continue
        if hasattr(other, field.name):
            compared += 1
            found, wanted = getattr(arch, field.name), getattr(other, field.name)
            assert (list(found) if isinstance(found, tuple) else found) == wanted, field.name
    assert compared >= 10


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() & CLASS_OF.keys() | {arch.MODEL_TYPES[0] for arch in ARCHS}))
def test_planner_and_trainer_have_the_same_tensors(kind: str) -> None:
    config = small(CLASS_OF.get(kind, kind)) | {"model_type": kind}
    planned = {(t.name, t.shape) for t in facts_from_config(config, name="x").tensors()}
    assert planned == {(t.name, t.shape) for t in arch_from_config(config).tensors()}


def test_glm_5_is_planned_whole_without_its_dense_layers() -> None:
    config = read_config(find_config("GLM-5"))
    whole = facts_from_config(config, name="x").num_parameters()
    left_out = {key: value for key, value in config.items() if key not in ("first_k_dense_replace", "mlp_layer_types")}
    assert facts_from_config(left_out, name="x").num_parameters() == whole
    assert round(whole / 1e9) == 744


@pytest.mark.parametrize("kind", sorted(DEFAULTS))
def test_null_is_read_as_transformers_reads_it_or_refused(kind: str) -> None:
    # the indexer reads compressed queries: the architecture refuses these
    refused = {"q_lora_rank"} if kind in ("glm_moe_dsa", "deepseek_v32") else set()
    for key in DEFAULTS[kind].keys() - {"rope_theta"} - refused:
        try:
            value = completed({"model_type": kind, "num_attention_heads": 4, key: None})[key]
        except ValueError as error:
            assert f"{key} is null" in str(error)  # noqa: PT017
            continue
        own = transformers.AutoConfig.for_model(CLASS_OF.get(kind, kind), num_attention_heads=4, **{key: None})
        assert getattr(own, key) == value, key


@pytest.mark.parametrize("kind", sorted(ALIASES))
def test_second_names_of_keys(kind: str) -> None:
    for second, first in ALIASES[kind].items():
        assert completed({"model_type": kind, second: 3})[first] == 3
        with pytest.raises(ValueError, match="its other name"):
            completed({"model_type": kind, second: 3, first: 4})


def test_configs_that_are_shipped_are_read() -> None:
    for name in known_models():
        assert facts_from_config(read_config(find_config(name)), name=name).num_parameters() > 0


def _frequency(config: Mapping[str, Any]) -> tuple[Any, ...]:
    rope = theirs("qwen3", config).rope_parameters
    keys = ("factor", "original_max_position_embeddings")
    return (rope["rope_theta"], *((rope.get(key) for key in keys) if rope["rope_type"] != "default" else (None, None)))


YARN = {"rope_type": "yarn", "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"rope_theta": 7e4},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 1024}, "rope_parameters": PLAIN},
        {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0, "rope_theta": 1e4}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
        {"rope_parameters": {**YARN, "rope_theta": 3e4}, "rope_scaling": {}},
        {"rope_parameters": PLAIN, "rope_scaling": None, "rope_theta": 1e6},
    ],
)
def test_groups_of_rope_are_those_of_transformers(groups: dict[str, Any]) -> None:
    config = {**small("qwen3"), **groups}
    arch: ModelArch = arch_from_config(config)
    own = arch.rope_scaling
    found = (None, None) if own is None else (own.factor, own.original_max_position_embeddings)
    wanted = _frequency({**config, **{key: dict(value) for key, value in groups.items() if isinstance(value, dict)}})
    assert (arch.rope_theta, *found) == wanted
    assert arch_from_config(arch.to_hf_config()) == arch


def test_an_original_context_that_transformers_does_not_read_is_refused() -> None:
    for group in (YARN, {**YARN, "original_max_position_embeddings": 64}):
        with pytest.raises(ValueError, match="write it into the group"):
            arch_from_config({**small("qwen3"), "rope_scaling": group, "original_max_position_embeddings": 512})


@pytest.mark.parametrize("value", [None, 3, ["M"]])
def test_layers_without_their_kinds_are_refused(value: Any, tmp_path: Path) -> None:
    config = {**small("nemotron_h"), "hybrid_override_pattern": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json lacks layers_block_type") as caught:
        load_arch(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    with pytest.raises(ValueError, match="layers_block_type"):
        facts_from_config(config, name="x")


def test_a_config_within_a_config_that_has_none_is_refused() -> None:
    with pytest.raises(ValueError, match="text_config and a model_type without one"):
        arch_from_config({**small("qwen3"), "text_config": small("qwen3_moe")})


@pytest.mark.parametrize(("wrapper", "kind"), [("kimi_k25", "deepseek_v3"), ("mistral3", "mistral")])
def test_a_wrapper_of_a_family_that_is_trained_is_refused_with_the_way_out(wrapper: str, kind: str) -> None:
    config = {"model_type": wrapper, "text_config": small(kind), "vision_config": {}}
    ways = "model.vision of the recipe; or `hpcrl model extract DIR --output DIR` writes"
    with pytest.raises(ValueError, match=f"a language model of {kind} .text_config.*{ways}"):
        arch_from_config(config)
    with pytest.raises(ValueError, match="model_type is 'other'; trainer and embedded engine know"):
        arch_from_config({"model_type": "other", "text_config": {"model_type": "mamba"}})


@pytest.mark.parametrize("kind", ["glm4_moe", "glm_moe_dsa", "deepseek_v3"])
def test_an_empty_list_of_kinds_says_nothing(kind: str) -> None:
    plain, empty = small(kind), {**small(kind), "mlp_layer_types": []}
    assert facts_from_config(empty, name="x") == facts_from_config(plain, name="x")
    assert arch_from_config(empty) == arch_from_config(plain)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss", "glm_moe_dsa"])
@pytest.mark.parametrize("value", [[[]], [{"a": 1}], [1.5], [None]])
@pytest.mark.parametrize("key", ["layer_types", "index_topk_pattern", "indexer_types", "mlp_layer_types"])
def test_lists_of_layers_hold_words_and_numbers(kind: str, value: Any, key: str) -> None:
    for read in (arch_from_config, lambda config: facts_from_config(config, name="x")):
        with pytest.raises(ValueError, match=f"{key} has"):
            read({**small(kind), key: value})


def test_a_pattern_that_names_no_layer_is_refused() -> None:
    for read in (arch_from_config, lambda config: facts_from_config(config, name="x")):
        with pytest.raises(ValueError, match="index_topk_pattern is ''"):
            read({**small("glm_moe_dsa"), "index_topk_pattern": ""})


@pytest.mark.parametrize("group", ["rope_scaling", "rope_parameters"])
def test_a_base_of_rope_beyond_all_sense_is_refused_in_a_group_too(group: str) -> None:
    for read in (arch_from_config, lambda config: facts_from_config(config, name="x")):
        with pytest.raises(ValueError, match=r"rope_theta of rope_scaling or rope_parameters is 1e\+308"):
            read({**small("qwen3"), group: {"rope_type": "default", "rope_theta": 1e308}})
