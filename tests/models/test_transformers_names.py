"""Tensor by tensor against transformers: what its models of small random shapes write with ``save_pretrained``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hpcrl.models import load_facts

torch = pytest.importorskip("torch")

SEEDS = (0, 1, 2)
DTYPES = {"F32": "float32", "BF16": "bfloat16"}


def _moe(rng: random.Random) -> dict[str, Any]:
    return {
        "num_experts_per_tok": rng.choice((1, 2)),
        "moe_intermediate_size": rng.choice((8, 12)),
        "intermediate_size": rng.choice((20, 36)),
    }


def _gqa(rng: random.Random) -> dict[str, Any]:
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice((1, 2, 4)),
        "head_dim": rng.choice((8, 16)),
        "attention_bias": rng.random() < 0.5,
    }


def _heads(rng: random.Random) -> dict[str, Any]:
    """Grouped queries of families whose config says nothing of biases."""
    sizes = _gqa(rng)
    del sizes["attention_bias"]
    return sizes


def _mla(rng: random.Random) -> dict[str, Any]:
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": rng.choice((12, 20)),
        "kv_lora_rank": rng.choice((8, 16)),
        "qk_rope_head_dim": rng.choice((4, 8)),
        "qk_nope_head_dim": rng.choice((6, 10)),
        "v_head_dim": rng.choice((5, 12)),
        "attention_bias": rng.random() < 0.5,
        "n_routed_experts": rng.choice((3, 4)),
        "n_shared_experts": rng.choice((1, 2)),
        "n_group": 1,
        "topk_group": 1,
    }


def _indexer(rng: random.Random) -> dict[str, Any]:
    return {"index_topk": 4, "index_head_dim": rng.choice((8, 16)), "index_n_heads": rng.choice((2, 3))}


def _deepseek(rng: random.Random) -> dict[str, Any]:
    return {**_mla(rng), **_moe(rng), "first_k_dense_replace": rng.choice((0, 1, 2))}


def _nemotron(rng: random.Random) -> dict[str, Any]:
    kinds = ["mamba", "attention", "moe", "mlp", *rng.choices(("mamba", "attention", "moe", "mlp"), k=3)]
    rng.shuffle(kinds)
    gqa = {**_gqa(rng), "attention_bias": False}
    return {
        **gqa,
        **_moe(rng),
        "layers_block_type": kinds,
        "n_routed_experts": 4,
        "n_shared_experts": rng.choice((1, 2)),
        "moe_shared_expert_intermediate_size": 14,
        "moe_latent_size": rng.choice((None, 10)),
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": rng.choice((4, 8)),
        "n_groups": rng.choice((1, 2)),
        "conv_kernel": rng.choice((2, 4)),
        "use_conv_bias": rng.random() < 0.5,
        "use_bias": rng.random() < 0.5,
        "mlp_bias": False,
    }


def _fused(rng: random.Random) -> dict[str, Any]:
    return {
        "intermediate_size": rng.choice((8, 12)),
        "num_local_experts": rng.choice((3, 4)),
        "num_experts_per_tok": rng.choice((1, 2)),
    }


def _llama4(rng: random.Random) -> dict[str, Any]:
    return {
        **_gqa(rng),
        **_fused(rng),
        "intermediate_size_mlp": rng.choice((20, 28)),
        "attention_chunk_size": 8,
        **rng.choice(({"interleave_moe_layer_step": rng.choice((1, 2))}, {"moe_layers": [0, 3]})),
    }


def _shared_moe(rng: random.Random) -> dict[str, Any]:
    sizes = {**_moe(rng), "num_experts": 4, "shared_expert_intermediate_size": rng.choice((6, 10))}
    del sizes["intermediate_size"]
    return sizes


def _qwen3_next(rng: random.Random) -> dict[str, Any]:
    return {
        **_gqa(rng),
        **_moe(rng),
        "num_experts": 4,
        "shared_expert_intermediate_size": rng.choice((6, 10)),
        "decoder_sparse_step": rng.choice((1, 2)),
        "mlp_only_layers": rng.choice(([], [1])),
        **_delta(rng),
    }


def _delta(rng: random.Random) -> dict[str, Any]:
    return {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": rng.choice((2, 4)),
        "linear_key_head_dim": rng.choice((4, 8)),
        "linear_value_head_dim": rng.choice((6, 8)),
        "linear_conv_kernel_dim": rng.choice((2, 4)),
        "full_attention_interval": rng.choice((2, 4)),
    }


FAMILIES = {
    "qwen2": ("Qwen2", lambda rng: {**_heads(rng), "intermediate_size": 24}),
    "llama": ("Llama", lambda rng: {**_gqa(rng), "intermediate_size": 24, "mlp_bias": rng.random() < 0.5}),
    "mistral": (
        "Mistral",
        lambda rng: {**_heads(rng), "intermediate_size": 24, "sliding_window": rng.choice((None, 8))},
    ),
    "qwen3": ("Qwen3", lambda rng: {**_gqa(rng), "intermediate_size": 24}),
    "qwen3_moe": (
        "Qwen3Moe",
        lambda rng: {
            **_gqa(rng),
            **_moe(rng),
            "num_experts": 4,
            "decoder_sparse_step": rng.choice((1, 2)),
            "mlp_only_layers": rng.choice(([], [1])),
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        lambda rng: {**_deepseek(rng), **({"q_lora_rank": None} if rng.random() < 0.4 else {})},
    ),
    "deepseek_v32": ("DeepseekV32", lambda rng: {**_deepseek(rng), **_indexer(rng)}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        lambda rng: {
            **_deepseek(rng),
            **_indexer(rng),
            "indexer_types": ["full", *rng.choices(("full", "shared"), k=3)],
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        lambda rng: {
            **_gqa(rng),
            **_moe(rng),
            "n_routed_experts": 4,
            "n_shared_experts": rng.choice((1, 2)),
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": rng.choice((0, 1, 2)),
            "use_qk_norm": rng.random() < 0.5,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", lambda rng: {**_mla(rng), **_moe(rng)}),
    "nemotron_h": ("NemotronH", _nemotron),
    "mixtral": ("Mixtral", lambda rng: {**_gqa(rng), **_fused(rng), "sliding_window": rng.choice((None, 8))}),
    "minimax_m2": ("MiniMaxM2", lambda rng: {**_gqa(rng), **_fused(rng)}),
    "gpt_oss": ("GptOss", lambda rng: {**_gqa(rng), **_fused(rng), "sliding_window": 8}),
    "llama4_text": ("Llama4", _llama4),
    "qwen3_next": ("Qwen3Next", _qwen3_next),
    "qwen3_5_text": ("Qwen3_5", lambda rng: {**_gqa(rng), **_delta(rng), "intermediate_size": 24}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", lambda rng: {**_gqa(rng), **_delta(rng), **_shared_moe(rng)}),
}
CONFIGS = {
    "llama4_text": "Llama4TextConfig",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
}


def _transformers() -> Any:
    """Not at the top: every worker collects this module, a second more with the import, and one runs it."""
    return pytest.importorskip("transformers", minversion="5.0")


def _small_model(model_type: str, seed: int) -> Any:
    transformers = _transformers()
    prefix, sizes = FAMILIES[model_type]
    rng = random.Random(f"{model_type}{seed}")
    common = {
        "vocab_size": 40,
        "hidden_size": rng.choice((16, 24)),
        "max_position_embeddings": 64,
        "tie_word_embeddings": rng.random() < 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if model_type == "nemotron_h":
        # its tied heads are written out twice by transformers; no published model ties them
        common["tie_word_embeddings"] = False
    else:
        common["num_hidden_layers"] = 4
    config = getattr(transformers, CONFIGS.get(model_type, f"{prefix}Config"))(**common, **sizes(rng))
    torch.manual_seed(seed)
    return getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, dtype=torch.bfloat16)


def _saved(directory: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    from safetensors import safe_open

    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                part = shard.get_slice(name)
                found[name] = (tuple(part.get_shape()), DTYPES[part.get_dtype()])
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_tensors_are_those_that_transformers_saves(model_type: str, seed: int, tmp_path: Path) -> None:
    model = _small_model(model_type, seed)
    model.save_pretrained(tmp_path / "made")
    # only loading applies what the architecture keeps in float32
    type(model).from_pretrained(tmp_path / "made", dtype=torch.bfloat16).save_pretrained(tmp_path / "loaded")
    ours = {spec.name: (spec.shape, spec.dtype) for spec in load_facts(tmp_path / "loaded").tensors()}
    assert ours == _saved(tmp_path / "loaded")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_whole_model_counts_what_transformers_counts(model_type: str) -> None:
    """Parameters and persistent buffers of the model in memory, where experts are fused."""
    model = _small_model(model_type, 7)
    held = {id(t): t.numel() for t in (*model.parameters(), *model.state_dict(keep_vars=True).values())}
    facts = load_facts_of(model.config)
    assert facts.num_parameters() == sum(held.values())


def test_llama4_with_its_eyes_names_its_language_model(tmp_path: Path) -> None:
    """What is published has a vision tower beside the language model, whose tensors are ours without exception."""
    text = _small_model("llama4_text", 0).config
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    transformers = _transformers()
    config = transformers.Llama4Config(text_config=text.to_dict(), vision_config=vision)
    transformers.Llama4ForConditionalGeneration._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    ours = {spec.name: (spec.shape, spec.dtype) for spec in load_facts(tmp_path).tensors()}
    saved = _saved(tmp_path)
    assert ours == {name: value for name, value in saved.items() if name.startswith("language_model.")}
    assert len(saved) > len(ours)


def test_the_eyes_are_what_the_published_count_of_llama4_has_beyond_ours() -> None:
    """Tower and projector of published sizes, without memory: 871,932,416 of 108,641,793,536 and 401,583,781,376."""
    vision = {
        "hidden_size": 1408,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "image_size": 336,
        "vision_output_dim": 4096,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
    }
    transformers = _transformers()
    config = transformers.Llama4Config(text_config={"hidden_size": 5120}, vision_config=vision)
    with torch.device("meta"):
        tower = transformers.Llama4VisionModel(config.vision_config)
    eyes = sum(p.numel() for p in tower.parameters()) + 4096 * 5120
    for name, published in (
        ("Llama-4-Scout-17B-16E-Instruct", 108_641_793_536),
        ("Llama-4-Maverick-17B-128E-Instruct", 401_583_781_376),
    ):
        assert load_facts(name).num_parameters() + eyes == published


def load_facts_of(config: Any) -> Any:
    from hpcrl.models.families import facts_from_config

    return facts_from_config(config.to_dict(), name="small")
