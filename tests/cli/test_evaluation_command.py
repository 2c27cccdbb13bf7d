"""``hpcrl eval`` of a run: the recipe and the profile of the run that evaluates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from start_models import write_tiny_model

from hpcrl.cli.main import main
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.errors import UsageError
from hpcrl.jobplan import absolute_paths, make_plan
from hpcrl.runs.rundir import RunDir
from hpcrl.submit.prepare import PreparedRun

RECIPE = """
name: mine
model: {path: MODEL}
environments: [{name: reverse, kind: words, task: reverse}]
rollouts: {rollouts_per_step: 16, group_size: 8, max_in_flight: 32, max_off_policy_steps: 4}
trainer: {steps: 1}
engine: {max_model_len: 64}
"""
STARTED = "a run would be started here"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run on a profile that was named by its path, in a directory that is not searched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    (tmp_path / "elsewhere").mkdir()
    profile = tmp_path / "elsewhere/local.yaml"
    profile.write_text("name: local\nkind: local\nenv: {MINE: 'yes'}\npaths: {runs_root: runs}\n")
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("MODEL", str(write_tiny_model(tmp_path / "model"))))
    recipe = absolute_paths(load_recipe(str(tmp_path / "mine.yaml")).value, tmp_path)
    made = RunDir(tmp_path / "runs/mine")
    made.path.mkdir(parents=True)
    made.record_path.write_text("{}")
    site = load_cluster(str(profile)).value
    made.write_configuration(recipe, site, make_plan(recipe, site, "mine", made.path))
    return made


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[PreparedRun]:
    """Return a list that gets the run that would be started."""
    found: list[PreparedRun] = []

    def submit(prepared: PreparedRun, **_: object) -> RunDir:
        found.append(prepared)
        raise UsageError(STARTED)

    monkeypatch.setattr("hpcrl.submit.start.submit", submit)
    # the run of this test has no version: the start model of its recipe is evaluated
    monkeypatch.setattr("hpcrl.runs.start.newest_weights.newest_weights", lambda *_: None)
    return found


def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["hpcrl", "eval", *arguments])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err


def test_a_run_is_evaluated_on_its_own_profile(
    run: RunDir,
    submitted: list[PreparedRun],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another profile has the same name, and is the one that the name finds."""
    assert STARTED in evaluate(monkeypatch, capsys, run.name)
    (prepared,) = submitted
    assert prepared.profile.env == {"MINE": "yes"}
    assert prepared.resolved.job.payload == "evaluation"
    assert prepared.planned().run_dir.parent == run.path.parent


def test_another_profile_may_be_named(
    run: RunDir,
    submitted: list[PreparedRun],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert STARTED in evaluate(monkeypatch, capsys, run.name, "--cluster", "local")
    assert submitted[0].profile.env == {}


def test_a_run_is_evaluated_with_the_environments_of_another_recipe(
    run: RunDir,
    submitted: list[PreparedRun],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("other.yaml").write_text(Path("mine.yaml").read_text().replace("task: reverse", "task: sort"))
    assert STARTED in evaluate(monkeypatch, capsys, run.name, "--recipe", "other.yaml")
    (prepared,) = submitted
    assert [each.task for each in prepared.resolved.environments if each.kind == "words"] == ["sort"]
    assert prepared.profile.env == {"MINE": "yes"}
    assert "for model directories and runs" in evaluate(monkeypatch, capsys, "mine.yaml", "--recipe", "other.yaml")


def test_a_supervised_run_needs_a_recipe_with_environments(
    run: RunDir,
    submitted: list[PreparedRun],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Path("model").resolve()
    Path("sft.yaml").write_text(f"name: sft\nmodel: {{path: {model}}}\nsft: {{data: x.jsonl}}\ntrainer: {{steps: 1}}\n")
    recipe = load_recipe("sft.yaml").value
    run.write_configuration(recipe, run.cluster(), make_plan(recipe, run.cluster(), run.name, run.path))
    assert "hint: --recipe RECIPE, which has them" in evaluate(monkeypatch, capsys, run.name)
    assert not submitted
    assert STARTED in evaluate(monkeypatch, capsys, run.name, "--recipe", "mine.yaml")
    assert submitted[0].resolved.environments
