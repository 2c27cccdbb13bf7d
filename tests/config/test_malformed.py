"""Every malformed recipe or profile gives a one-screen error that names file, key and hint, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from malformed_files import RECIPE, Case, check_message, edited, run

CLUSTER = """\
name: site
kind: local
paths:
  runs_root: runs
"""

RECIPES = {
    "unknown key": Case("  steps: 10", "  steps: 10\n  rank: 2", 10, "trainer.rank", "unknown key", "'ranks'"),
    "key of another kind": Case(
        "kind: words", "kind: words\n    factory: 'a:B'", 8, "environments.0.factory", "unknown key", "keys here"
    ),
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
    "key without its section": Case("trainer:\n  steps: 10", "steps: 10", 8, "steps", "unknown key", "'trainer.steps'"),
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
    "fabric without a whole copy": Case(
        "trainer:",
        "handoff: {transport: fabric, overlap: false}\ntrainer:",
        8,
        "handoff.overlap",
        "a whole copy",
        "set handoff.overlap: true",
    ),
    "versions that no way brings to engines": Case(
        "trainer:",
        "handoff: {durable_every: 3}\ntrainer:",
        8,
        "handoff.durable_every",
        "from the shared filesystem",
        "set handoff.durable_every: 1",
    ),
    "changes of versions that are not kept": Case(
        "trainer:",
        "handoff: {transport: fabric, durable_every: 3, delta_chain: 2}\ntrainer:",
        8,
        "handoff.delta_chain",
        "every reader can have",
        "without handoff.delta_chain",
    ),
    "fabric of adapters that a machine has not": Case(
        "trainer:",
        "handoff: {transport: fabric, fabric_protocol: rdma}\ntrainer:",
        8,
        "handoff.fabric_protocol",
        "no network adapters",
        "protocol: tcp",
    ),
    "rule: batch of groups": Case(
        "trainer:", "rollouts: {rollouts_per_step: 10}\ntrainer:", 8, "rollouts.rollouts_per_step", "multiple", "choose"
    ),
    "temperature of engines that round it": Case(
        "trainer:",
        "rollouts: {sampling: {temperature: 0.001}}\ntrainer:",
        8,
        "rollouts.sampling.temperature",
        "0.01",
        "",
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


def test_nodes_on_a_local_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("  steps: 10", "  steps: 10\n  ranks: 2\n  nodes: 2"))
    assert run(monkeypatch, "recipe", "check", str(recipe)) == 2
    err = capsys.readouterr().err
    assert f"{recipe}:11: trainer.nodes: 2 nodes, but a local cluster is one machine [local-is-one-node]" in err
    # of a recipe for a site, what else the machine of who checks it could not do is not said
    assert run(monkeypatch, "recipe", "check", "glm5_swe") == 2
    err = capsys.readouterr().err
    # three of the recipe, and its model, which is not here
    assert "hpcrl: 4 problems" in err
    assert err.count("[local-is-one-node]") == 3


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
