"""Language models that are taken out of models that also see, against what transformers computes of the whole ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from start_models import write_tiny_model

from hpcrl.errors import UsageError
from hpcrl.jobplan.language_model import extract_language_model, language_model_name
from hpcrl.jobplan.model_summary import summarise_model
from hpcrl.models.tokenizer import write_character_tokenizer

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": 103,
}
VISION = {
    "llava": {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "image_size": 8, "patch_size": 4},
    "mistral3": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "head_dim": 8},
    "qwen3_vl": {"model_type": "qwen3_vl", "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2}
    | {"patch_size": 4, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
VISION |= {kind: {**VISION["qwen3_vl"], "model_type": f"{kind}_vision"} for kind in ("qwen3_5", "qwen3_5_moe")}
for kind in ("qwen3_5", "qwen3_5_moe"):
    del VISION[kind]["deepstack_visual_indexes"]
INNER = {"llava": "llama", "mistral3": "mistral", "qwen3_vl": "qwen3_vl_text"}
INNER |= {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
BESIDE = {"qwen3_5": DELTA, "qwen3_5_moe": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 20}}


def test_names_of_both_kinds_of_wrappers() -> None:
    for name, own in {
        "language_model.model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.language_model.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
        "model.language_model.embed_tokens.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        "vision_tower.encoder.blocks.0.norm.weight": None,
        "mm_projector.proj.0.weight": None,
        "model.visual.patch_embed.proj.weight": None,
        "model.multi_modal_projector.norm.weight": None,
    }.items():
        assert language_model_name(name) == own


def wrapper(path: Path, kind: str, **text: Any) -> Any:
    """Save a small model that sees, with random weights, as transformers does."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForImageTextToText

    inner = {"model_type": INNER[kind], **TEXT, **BESIDE.get(kind, {}), **text}
    config = AutoConfig.for_model(kind, text_config=inner, vision_config=VISION[kind])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(path)
    write_character_tokenizer(path)
    (path / "preprocessor_config.json").write_text("{}")
    return model.eval()


@pytest.mark.parametrize("kind", list(INNER))
@pytest.mark.parametrize("tied", [False, True])
def test_text_is_what_the_whole_model_makes_of_it(tmp_path: Path, kind: str, *, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    from model_agreement import load_ours, packed_logits, token_ids
    from transformers import AutoModelForCausalLM

    whole = wrapper(tmp_path / "whole", kind, tie_word_embeddings=tied)
    assert not summarise_model(tmp_path / "whole").is_good
    (what, _), *_ = summarise_model(tmp_path / "whole").problems
    assert "hpcrl model extract" in what
    extracted = extract_language_model(tmp_path / "whole", tmp_path / "own")
    assert sum(extracted.left_out.values()) > 0
    assert all(("vision" in name or "visual" in name or "projector" in name) for name in extracted.left_out)
    assert summarise_model(tmp_path / "own").is_good
    assert not (tmp_path / "own/preprocessor_config.json").exists()
    ids = token_ids()
    with torch.no_grad():
        wanted = torch.cat([whole(input_ids=each[None]).logits[0] for each in ids])
        torch.testing.assert_close(packed_logits(load_ours(tmp_path / "own"), ids), wanted, rtol=2e-4, atol=2e-5)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "own", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_experts_in_one_tensor_are_taken_apart_and_prediction_is_kept(tmp_path: Path) -> None:
    """As Qwen3.5 is published: experts of a layer lie in two tensors, multi-token prediction beside the model."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    wrapper(tmp_path / "whole", "qwen3_5_moe", mtp_num_hidden_layers=1)
    tensors = load_file(tmp_path / "whole/model.safetensors")
    apart = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    wanted = {name.replace("model.language_model.", "model."): tensor for name, tensor in apart.items()}
    stacked = {name: tensor for name, tensor in tensors.items() if name not in apart}
    for layer in range(TEXT["num_hidden_layers"]):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        own = [{m: apart[f"{prefix}.{e}.{m}_proj.weight"] for m in ("gate", "up", "down")} for e in range(4)]
        stacked[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((each["gate"], each["up"])) for each in own])
        stacked[f"{prefix}.down_proj"] = torch.stack([each["down"] for each in own])
    stacked["mtp.fc.weight"] = torch.randn(32, 64)
    save_file(stacked, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    extract_language_model(tmp_path / "whole", tmp_path / "own")
    (file,) = (tmp_path / "own").glob("*.safetensors")
    found = load_file(file)
    assert len(wanted) == 3 * 4 * TEXT["num_hidden_layers"]
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert torch.equal(found["mtp.fc.weight"], stacked["mtp.fc.weight"])
    assert summarise_model(tmp_path / "own").is_good


def test_what_wraps_nothing_that_is_known_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with pytest.raises(UsageError, match="has no text_config"):
        extract_language_model(model, tmp_path / "own")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "sees", "text_config": {"model_type": "gemma3_text"}}))
    with pytest.raises(UsageError, match="text_config: model_type is 'gemma3_text'; trainer"):
        extract_language_model(model, tmp_path / "own")
    # tensors of another model
    config["hidden_size"] = 16
    (model / "config.json").write_text(json.dumps({"model_type": "sees", "text_config": config}))
    with pytest.raises(UsageError, match="would not be whole"):
        extract_language_model(model, tmp_path / "own")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model"]
    with pytest.raises(UsageError, match="exists already"):
        extract_language_model(model, model)
