"""``hpcrl plan`` says that a run starts only where ``hpcrl submit`` starts it: shipped recipes, published models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from start_models import write_tiny_model

from hpcrl.cli.main import main
from hpcrl.config.resources import list_recipes
from hpcrl.models import known
from hpcrl.submit import prepare as preparing
from hpcrl.submit.prepare import PreparedRun, prepare
from hpcrl.submit.start import with_admission

Hpcrl = Callable[..., tuple[int, str, str]]
CONFIGS = Path(known.__file__).parent / "configs"
#: what newcomers bring, of which some can be planned and not trained
PUBLISHED = (
    *("Qwen2.5-7B-Instruct", "Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.3", "Mixtral-8x7B-Instruct-v0.1"),
    *("Qwen3-Next-80B-A3B-Instruct", "gpt-oss-20b", "Qwen3-8B", "Qwen3-VL-30B-A3B"),
)


@pytest.fixture
def hpcrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hpcrl:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


def compare(hpcrl: Hpcrl, *arguments: str) -> bool:
    """Ask both commands for one answer; returns whether it starts."""
    code, _, refusal = hpcrl("submit", *arguments, "--dry-run")
    planned, out, err = hpcrl("plan", *arguments, "--json")
    if not out:
        # rules end a plan before it is made, and the planner has no terms for engines on the trainer's devices
        assert planned in (2, 3), err
        assert code == 2 or "engine.placement: colocated" in err
        return False
    starts = json.loads(out)["forecast"]["starts"]
    assert (starts["ok"], starts["exit_code"]) == (code == 0, code), refusal
    assert all(each["what"] in refusal for each in starts["problems"])
    assert bool(starts["problems"]) == (not starts["ok"])
    said = hpcrl("plan", *arguments)[1]
    assert ("starts it" in said) == starts["ok"]
    return bool(starts["ok"])


@pytest.mark.parametrize("recipe", sorted(list_recipes()))
def test_shipped_recipes_without_their_models(recipe: str, hpcrl: Hpcrl) -> None:
    assert not any(compare(hpcrl, recipe, "-c", cluster) for cluster in ("local", "h200-28"))


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models(model: str, hpcrl: Hpcrl, tmp_path: Path) -> None:
    """Of the configuration alone: no weights and no tokenizer are there."""
    (tmp_path / "model").mkdir()
    path = CONFIGS / f"{model}.json"
    vision = {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", "hidden_size": 2048}}
    text = path.read_text() if path.is_file() else json.dumps(vision)
    (tmp_path / "model/config.json").write_text(text)
    assert not compare(hpcrl, "qwen3_30b_a3b", "-c", "h200-28", "--set", "model.path=model")


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_lora"])
def test_recipes_with_a_model_start(recipe: str, hpcrl: Hpcrl, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    assert compare(hpcrl, recipe, "--set", "model.path=model")


def test_a_directory_of_runs_that_all_users_may_write_is_reported_by_both(hpcrl: Hpcrl, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o777)
    assert not compare(hpcrl, "quickstart", "--set", "model.path=model")


def test_a_name_that_is_taken_is_refused_by_a_dry_run(hpcrl: Hpcrl, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "runs/mine").mkdir(parents=True)
    code, _, err = hpcrl("submit", "quickstart", "--set", "model.path=model", "--name", "mine", "--dry-run")
    assert (code, "exists and is not a run" in err) == (2, True)


def test_a_plan_on_a_site_starts_only_where_slurm_answers(
    hpcrl: Hpcrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no commands of Slurm on this machine's path: a submit is refused, and so is the promise."""
    monkeypatch.setattr(preparing, "try_programs", lambda prepared: prepared)
    monkeypatch.setenv("PATH", str(tmp_path))
    write_tiny_model(tmp_path / "model")
    settings = ["model.path=model", "job.payload=probe"]
    arguments = ("quickstart", "-c", "devcluster", *(word for each in settings for word in ("--set", each)))
    prepared = prepare("quickstart", "devcluster", settings, environ={}, cwd=tmp_path, programs=False)
    assert prepared.starts, prepared.problems
    (problem,) = with_admission(prepared).problems
    code, _, refusal = hpcrl("submit", *arguments)
    assert (code, problem.what in refusal) == (2, True), refusal
    said = hpcrl("plan", *arguments)[1]
    assert "starts it" not in said
    assert "hpcrl submit says: " in said


def test_a_prepared_run_with_problems_has_no_plan_to_submit(tmp_path: Path) -> None:
    prepared: PreparedRun = prepare("quickstart", "local", environ={}, cwd=tmp_path, programs=False)
    assert not prepared.starts
    with pytest.raises(preparing.ConfigError):
        prepared.planned()
