"""Every malformed recipe or profile gives a one-screen error that names file, key and way out, and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcrl.cli.main import main

RECIPE = """\
name: good
model:
  path: models/good
  warmup: {num_experts: 8}
environments:
  - name: words
    kind: words
trainer:
  steps: 10
"""
CLUSTER = """\
name: site
kind: local
paths:
  runs_root: runs
"""


class Case(NamedTuple):
    """What is replaced in the good file, and what the error must say."""

    old: str
    new: str
    line: int
    key: str
    says: str
    way_out: str


RECIPES = {
    "unknown key": Case("  steps: 10", "  steps: 10\n  rank: 2", 10, "trainer.rank", "unknown key", "'ranks'"),
    "unknown section": Case("trainer:", "trainr: {}\ntrainer:", 8, "trainr", "unknown key", "'trainer'"),
    "missing value": Case("  steps: 10", "  ranks: 1", 8, "trainer.steps", "is required", "add it"),
    "text for number": Case("steps: 10", "steps: '10'", 9, "trainer.steps", "whole number", "without quotes"),
    "fraction for count": Case("steps: 10", "steps: 2.5", 9, "trainer.steps", "whole number", "Optimizer steps"),
    "boolean for number": Case("steps: 10", "steps: true", 9, "trainer.steps", "whole number", "Optimizer steps"),
    "zero": Case("steps: 10", "steps: 0", 9, "trainer.steps", "greater than 0", ""),
    "negative": Case(
        "  steps: 10",
        "  steps: 10\n  optimizer: {weight_decay: -1}",
        10,
        "trainer.optimizer.weight_decay",
        "greater",
        "",
    ),
    "not a number": Case(
        "  steps: 10", "  steps: 10\n  optimizer: {learning_rate: .nan}", 10, "trainer.optimizer.learning_rate", "", ""
    ),
    "list for mapping": Case("trainer:\n  steps: 10", "trainer: [10]", 8, "trainer", "mapping", ""),
    "wrong choice": Case(
        "kind: words", "kind: words\n    task: revers", 8, "environments.0.task", "one of", "'reverse'"
    ),
    "wrong kind": Case("kind: words", "kind: wrods", 6, "environments.0", "must be one of", "'words'"),
    "no kind": Case("    kind: words\n", "", 6, "environments.0", "no 'kind'", "kind: words"),
    "no environments": Case("  - name: words\n    kind: words\n", "  []\n", 5, "environments", "at least 1", ""),
    "bad name": Case("name: good", "name: ../good", 1, "name", "right form", "must match"),
    "duplicate key": Case("  steps: 10", "  steps: 10\n  steps: 11", 10, "trainer.steps", "twice", "remove one"),
    "not YAML": Case("  steps: 10", "  steps: [10", 10, "", "not valid YAML", ""),
    "number as key": Case("  steps: 10", "  steps: 10\n  3: 4", 10, "trainer.3", "keys are text", '"3"'),
    "bad factory": Case(
        "kind: words", "kind: custom\n    factory: nowhere", 8, "environments.0.factory", "right form", "match"
    ),
    "extends nothing": Case("name: good", "extends: quickstrt\nname: good", 1, "extends", "no recipe", "'quickstart'"),
    "rule: batch of groups": Case(
        "trainer:",
        "rollouts: {rollouts_per_step: 10}\ntrainer:",
        8,
        "rollouts.rollouts_per_step",
        "multiple",
        "multiple of group_size",
    ),
    "rule: group of one": Case(
        "trainer:", "rollouts: {group_size: 1}\ntrainer:", 8, "rollouts.group_size", "nothing to compare", "2 or more"
    ),
    "rule: context": Case(
        "trainer:", "engine: {max_model_len: 600}\ntrainer:", 8, "engine.max_model_len", "512 positions", "lower"
    ),
    "rule: experts": Case(
        "num_experts: 8",
        "num_experts: 8, num_experts_per_tok: 9",
        4,
        "model.warmup.num_experts_per_tok",
        "9",
        "correct",
    ),
    "rule: silent loss setting": Case(
        "trainer:",
        "algorithm: {loss: {kind: tis, mask_low: 0.1}}\ntrainer:",
        8,
        "algorithm.loss.mask_low",
        "effect",
        "remove",
    ),
    "rule: warm-up": Case(
        "  steps: 10",
        "  steps: 10\n  optimizer: {warmup_steps: 10}",
        10,
        "trainer.optimizer.warmup_steps",
        "run of 10",
        "raise",
    ),
}
CLUSTERS = {
    "unknown key": Case("kind: local", "kind: local\nport: {}", 3, "port", "unknown key", "'ports'"),
    "wrong kind": Case("kind: local", "kind: lcoal", 2, "kind", "must be", ""),
    "no runs root": Case("  runs_root: runs", "  run_root: runs", 4, "paths.run_root", "unknown key", "'runs_root'"),
    "other name": Case("name: site", "name: other", 1, "name", "called", "same name"),
    "port out of range": Case("kind: local", "kind: local\nports: {first: 80}", 3, "ports.first", "1024", ""),
    "empty port range": Case(
        "kind: local", "kind: local\nports: {first: 3000, last: 3000}", 3, "cluster.ports.last", "holds 1", "widen"
    ),
    "unexpected value": Case("kind: local", "kind: local\nenv: {A: 1}", 3, "env.A", "text", ""),
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return int(exit_info.value.code or 0)


def edited(good: str, case: Case) -> str:
    assert case.old in good
    return good.replace(case.old, case.new, 1)


@pytest.mark.parametrize("case", RECIPES.values(), ids=RECIPES.keys())
def test_malformed_recipe(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(edited(RECIPE, case))
    code = run(monkeypatch, "recipe", "check", str(path))
    check_message(capsys, code, f"{path}:{case.line}: {case.key}", case)


@pytest.mark.parametrize("case", CLUSTERS.values(), ids=CLUSTERS.keys())
def test_malformed_cluster(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "site.yaml"
    recipe.write_text(RECIPE)
    path.write_text(edited(CLUSTER, case))
    code = run(monkeypatch, "recipe", "check", str(recipe), "--cluster", str(path))
    check_message(capsys, code, f"{path}:{case.line}: {case.key}", case)


def check_message(capsys: pytest.CaptureFixture[str], code: int, start: str, case: Case) -> None:
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    line = next(line for line in err.splitlines() if start in line)
    assert case.says in line
    assert case.way_out in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 24


def test_good_files_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, site = tmp_path / "recipe.yaml", tmp_path / "site.yaml"
    recipe.write_text(RECIPE)
    site.write_text(CLUSTER)
    assert run(monkeypatch, "recipe", "check", str(recipe), "--cluster", str(site)) == 0
    assert "good on site" in capsys.readouterr().out


def test_all_problems_of_a_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("steps: 10", "steps: 0\n  rnks: 1").replace("name: words", "name: ''"))
    assert run(monkeypatch, "recipe", "check", str(path), "--set", "trainer.threads=no") == 2
    err = capsys.readouterr().err
    for key in ("trainer.steps", "trainer.rnks", "environments.0.name", "--set: trainer.threads"):
        assert key in err
    assert "4 problems" in err


def test_missing_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "recipe", "check", "nowhere/recipe.yaml") == 2
    assert "no such file" in capsys.readouterr().err
