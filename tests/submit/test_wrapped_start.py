"""A recipe whose ``model.path`` is a model that also sees: one answer of all commands, before anything is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from start_models import write_safetensors
from test_prepare import RECIPE, Hpcrl, hpcrl, prepared
from wrapped_models import write_wrapper

from hpcrl.jobplan.model_summary import summarise_model
from hpcrl.models.known import find_config, load_facts

__all__ = ["hpcrl"]  # a fixture


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wrapped") / "whole"
    write_wrapper(path, "llava")
    return path


@pytest.fixture
def recipe(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace("MODEL", str(whole)))
    return path


def test_without_the_setting_all_commands_refuse_it_in_the_same_words(recipe: Path, whole: Path, hpcrl: Hpcrl) -> None:
    for command in (
        ("recipe", "check", str(recipe)),
        ("plan", str(recipe)),
        ("submit", str(recipe), "--dry-run"),
        ("model", "check", str(whole)),
    ):
        code, out, err = hpcrl(*command)
        said = " ".join((out + err).split())
        assert "model_type is 'llava', a wrapper around a language model of llama" in said, command
        assert "model.vision of the recipe; or `hpcrl model extract" in said, command
        assert "hint: set model.vision: drop, or carry" in said or command[0] == "plan", command
        assert code == (0 if command[0] == "plan" else 1 if command[0] == "model" else 2), command


@pytest.mark.parametrize("vision", ["drop", "carry"])
def test_with_the_setting_all_commands_take_it(recipe: Path, whole: Path, hpcrl: Hpcrl, vision: str) -> None:
    found = prepared(recipe, f"model.vision={vision}")
    assert found.problems == ()
    assert found.planned().run.startswith("mine-")
    setting = ("--set", f"model.vision={vision}")
    for command in (("recipe", "check"), ("plan",), ("submit", "--dry-run")):
        code, out, err = hpcrl(*command, str(recipe), *setting)
        assert code == 0, out + err
    code, out, _ = hpcrl("model", "check", str(whole), "--vision", vision)
    assert code == 0, out
    assert f"{'left out of' if vision == 'drop' else 'carried into'} exports" in out
    # the planner counts the language model
    assert load_facts(whole).num_parameters() < 60_000
    assert load_facts(whole).model_type == "llama"


def test_nothing_to_carry_is_refused(recipe: Path, whole: Path, tmp_path: Path) -> None:
    from hpcrl.jobplan.language_model import extract_language_model

    own = tmp_path / "own"
    extract_language_model(whole, own)
    (problem,) = prepared(recipe, f"model.path={own}", "model.vision=carry").problems
    assert (problem.key, "has no vision tower to carry" in problem.what) == ("model.vision", True)
    # nothing is there to be dropped, and nothing is lost
    assert prepared(recipe, f"model.path={own}", "model.vision=drop").problems == ()


def test_quantised_tower_is_not_carried(recipe: Path, whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for each in whole.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    data = (whole / "model.safetensors").read_bytes()
    head: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    head.pop("__metadata__", None)
    name = next(name for name in head if "vision" in name)
    begin, end = head[name]["data_offsets"]
    head[name] |= {"dtype": "F8_E4M3", "shape": [end - begin]}
    write_safetensors(copy / "model.safetensors", head, max(each["data_offsets"][1] for each in head.values()))
    (problem,) = prepared(recipe, f"model.path={copy}", "model.vision=carry").problems
    assert name in problem.what
    assert "has dtype float8_e4m3fn, and exports are not quantised" in problem.what
    assert prepared(recipe, f"model.path={copy}", "model.vision=drop").problems == ()


def test_vllm_is_refused_with_the_way_out(recipe: Path) -> None:
    found = prepared(recipe, "model.vision=drop", "engine.backend=vllm", "engine.device=cpu")
    (problem,) = [each for each in found.problems if "vision tower" in each.what]
    assert "hpcrl model extract" in problem.hint
    assert "engine.backend: embedded" in problem.hint


def test_unknown_value_of_model_check_is_refused(whole: Path, hpcrl: Hpcrl) -> None:
    code, _, err = hpcrl("model", "check", str(whole), "--vision", "see")
    assert code == 2
    assert "--vision see is neither drop nor carry" in err


def test_damaged_wrapper_is_named(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for each in whole.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    data = (whole / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[:-9])
    (what, _), *_ = summarise_model(copy, "drop").problems
    assert "was not copied whole" in what


@pytest.mark.parametrize("vision", ["drop", "carry"])
def test_packed_language_model_is_refused_with_how_it_is_stored(recipe: Path, tmp_path: Path, vision: str) -> None:
    """As Kimi-K2.5 is published: four bits a number."""
    model = tmp_path / "kimi"
    text = json.loads(find_config("Kimi-K2-Instruct").read_text())
    text["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    whats = " ".join(each.what for each in prepared(recipe, f"model.path={model}", f"model.vision={vision}").problems)
    assert "quant_method 'compressed-tensors'" in whats
    assert "block FP8" in whats
