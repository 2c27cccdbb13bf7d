"""`hpcrl model check`: what it says of a directory, and that it refuses what trainer and engines refuse."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from start_models import TINY_CONFIG, write_tiny_model

from hpcrl.jobplan.model_summary import summarise_model

CONFIGS = Path(__file__).parents[2] / "hpcrl/models/configs"


def test_a_whole_model_is_described(tmp_path: Path) -> None:
    summary = summarise_model(write_tiny_model(tmp_path / "model"))
    assert summary.is_good
    assert summary.facts["family"] == "qwen3_moe (Qwen3MoeForCausalLM)"
    assert "experts: 2" in summary.facts["size"]
    assert summary.facts["weights"].endswith("in float32; tensors: 18, files: 1")
    assert summary.facts["chat template"] == "tokenizer_config.json"
    assert summary.as_json()["good"] is True


def test_a_tokenizer_that_was_not_loaded_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core install has no tokenizers package."""
    model = write_tiny_model(tmp_path / "model")
    assert "tokenizers is not installed" not in summarise_model(model).facts["tokenizer"]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find(name))
    summary = summarise_model(model)
    assert summary.is_good
    assert "read as JSON alone: tokenizers is not installed here" in summary.facts["tokenizer"]


def test_blocks_and_scales_count_as_what_they_are_of(tmp_path: Path) -> None:
    weights = summarise_model(write_tiny_model(tmp_path / "fp8", fp8=True)).facts["weights"]
    assert "in float8_e4m3fn" in weights
    assert "in float32" in weights


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama4"}, "trainer and embedded engine know deepseek_v3, "),
        ({"hidden_size": 16}, "has shape"),
        ({"num_hidden_layers": 2}, "tensors are missing, the first is 'model.layers.1."),
        ({"num_experts": 1}, "is not part of this model"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
    ],
)
def test_what_no_run_starts_from_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({**TINY_CONFIG, **change}))
    summary = summarise_model(model)
    assert not summary.is_good
    assert any(says in what for what, _ in summary.problems), summary.problems


def test_tokenizers_and_templates_are_checked(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for %}")
    assert any("chat_template.jinja" in what for what, _ in summarise_model(model).problems)
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer.json").unlink()
    assert any("has no tokenizer.json" in what for what, _ in summarise_model(model).problems)
    (model / "config.json").unlink()
    (problem,) = summarise_model(model).problems
    assert "holds no model (no config.json)" in problem[0]
