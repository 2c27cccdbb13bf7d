"""Language models that are taken out of models that also see, against what transformers computes of the whole ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from start_models import write_tiny_model
from wrapped_models import KINDS, write_wrapper

from hpcrl.errors import UsageError
from hpcrl.jobplan.language_model import extract_language_model
from hpcrl.jobplan.model_summary import summarise_model
from hpcrl.weights.read.wrapped_names import language_model_name


def test_names_of_both_kinds_of_wrappers() -> None:
    for name, own in {
        "language_model.model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.language_model.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
        "model.language_model.embed_tokens.weight": "model.embed_tokens.weight",
        "mtp.layers.0.mlp.gate.weight": "mtp.layers.0.mlp.gate.weight",
        "lm_head.weight": "lm_head.weight",
        "vision_tower.encoder.blocks.0.norm.weight": None,
        "mm_projector.proj.0.weight": None,
        "model.visual.patch_embed.proj.weight": None,
        "model.multi_modal_projector.norm.weight": None,
    }.items():
        assert language_model_name(name) == own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_text_is_what_the_whole_model_makes_of_it(tmp_path: Path, kind: str, *, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    from model_agreement import load_ours, packed_logits, token_ids
    from transformers import AutoModelForCausalLM

    whole = write_wrapper(tmp_path / "whole", kind, tie_word_embeddings=tied)
    assert not summarise_model(tmp_path / "whole").is_good
    (what, _), *_ = summarise_model(tmp_path / "whole").problems
    assert "hpcrl model extract" in what
    assert "model.vision" in what
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


def test_published_experts_are_taken_apart_and_prediction_is_kept(tmp_path: Path) -> None:
    """As Qwen3.5 is published: experts of a layer lie in two tensors, multi-token prediction beside the model."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    write_wrapper(tmp_path / "whole", "qwen3_5_moe, published", mtp_num_hidden_layers=1)
    stored = load_file(tmp_path / "whole/model.safetensors")
    extract_language_model(tmp_path / "whole", tmp_path / "own")
    (file,) = (tmp_path / "own").glob("*.safetensors")
    found = load_file(file)
    for before, after in (("model.language_model.layers.1", "model.layers.1"), ("mtp.layers.0", "mtp.layers.0")):
        gates_and_ups = stored[f"{before}.mlp.experts.gate_up_proj"]
        for expert in range(len(gates_and_ups)):
            own = f"{after}.mlp.experts.{expert}"
            parts = [found[f"{own}.{part}.weight"] for part in ("gate_proj", "up_proj")]
            assert torch.equal(torch.cat(parts), gates_and_ups[expert])
            assert torch.equal(found[f"{own}.down_proj.weight"], stored[f"{before}.mlp.experts.down_proj"][expert])
    assert torch.equal(found["mtp.fc.weight"], stored["mtp.fc.weight"])
    config = json.loads((tmp_path / "own/config.json").read_text())
    assert config["model_type"] == "qwen3_5_moe_text"
    assert config["mtp_num_hidden_layers"] == 1
    assert not [key for key in config["rope_parameters"] if key.startswith("mrope")]
    assert summarise_model(tmp_path / "own").is_good


def test_what_wraps_nothing_that_is_known_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with pytest.raises(UsageError, match="has no text_config"):
        extract_language_model(model, tmp_path / "own")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "sees", "text_config": {"model_type": "gemma3_text"}}))
    with pytest.raises(UsageError, match=r"model_type is 'sees'; trainer .*its text_config is of 'gemma3_text'"):
        extract_language_model(model, tmp_path / "own")
    # tensors of another model
    config["hidden_size"] = 16
    (model / "config.json").write_text(json.dumps({"model_type": "sees", "text_config": config}))
    with pytest.raises(UsageError, match="would be incomplete"):
        extract_language_model(model, tmp_path / "own")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model"]
    with pytest.raises(UsageError, match="exists already"):
        extract_language_model(model, model)
