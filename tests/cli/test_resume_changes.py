"""``hpcrl resume --set``: what of a run's recipe may change between two attempts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from start_models import write_tiny_model

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.errors import ConfigError
from hpcrl.jobplan import change_recipe, make_plan
from hpcrl.network.credentials import TOKEN_FILE
from hpcrl.submit.prepare import examine_attempt
from hpcrl.submit.resume import plan_attempt
from hpcrl.submit.submission import create_run


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(load_recipe("quickstart").value.model_dump(mode="json")))
    return path


def test_ranks_may_change(recipe_path: Path) -> None:
    loaded, changes = change_recipe(recipe_path, ["trainer.ranks=4", "checkpoint.mode=sync", "trainer.dtype=float32"])
    assert loaded.value.trainer.ranks == 4
    assert changes == ["trainer.ranks: 1 -> 4", "checkpoint.mode: async -> sync"]


@pytest.mark.parametrize("override", ["seed=5", "rollouts.group_size=2", "model.path=elsewhere", "name=other"])
def test_what_gives_checkpoints_their_meaning_may_not(recipe_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot change in a run that has checkpoints\n.*hint: submit a new run"):
        change_recipe(recipe_path, ["trainer.ranks=4", override])


def test_environments_may_be_added_and_weighed(recipe_path: Path) -> None:
    recipe = yaml.safe_load(recipe_path.read_text())
    first, *others = recipe["environments"]
    assert change_recipe(recipe_path, ["environments.0.weight=0.25"])[1] == ["environments.0.weight: 1.0 -> 0.25"]
    second = {"name": "sums", "kind": "calculator", "weight": 3.0}
    both = [f"environments={yaml.safe_dump([second, first, *others], default_flow_style=True, width=10_000).strip()}"]
    loaded, changes = change_recipe(recipe_path, both)
    assert [each.name for each in loaded.value.environments][:2] == ["sums", first["name"]]
    assert changes
    one = [f"environments={yaml.safe_dump([second, *others], default_flow_style=True, width=10_000).strip()}"]
    with pytest.raises(ConfigError, match=rf"environments.{first['name']}: cannot be removed .*\n.*very small weight"):
        change_recipe(recipe_path, one)
    other = [f"environments.0={yaml.safe_dump({**first, 'latency': {'median_s': 1.0}}, default_flow_style=True)}"]
    with pytest.raises(ConfigError, match="cannot change in a run that has checkpoints, except for its weight"):
        change_recipe(recipe_path, other)


def test_how_an_evaluation_draws_may_not_change(recipe_path: Path) -> None:
    """Samples of earlier attempts are not drawn again."""
    recipe = yaml.safe_load(recipe_path.read_text())
    recipe["job"]["payload"] = "evaluation"
    recipe["evaluation"]["sets"] = [{"name": "all", "samples": 2, "sampling": {"temperature": 1.0}}]
    recipe_path.write_text(yaml.safe_dump(recipe))
    assert change_recipe(recipe_path, ["evaluation.failures=exclude"])[1] == ["evaluation.failures: zero -> exclude"]
    with pytest.raises(ConfigError, match="environments: cannot change"):
        change_recipe(recipe_path, ["environments.0.weight=0.25"])
    for override in ("rollouts.sampling.max_new_tokens=4", "evaluation.sampling.top_p=0.5"):
        with pytest.raises(ConfigError, match=r"cannot change in an evaluation.*\n.*hpcrl eval"):
            change_recipe(recipe_path, [override])


def test_a_wrong_override_is_refused(recipe_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.rank"):
        change_recipe(recipe_path, ["trainer.rank=4"])


def test_a_run_that_was_planned_before_there_were_tokens_is_planned_anew(tmp_path: Path) -> None:
    """Its vLLM engines would answer everybody."""
    recipe, cluster = load_recipe("quickstart_vllm").value, load_cluster("local").value
    run = create_run(recipe, cluster, make_plan(recipe, cluster, "old", tmp_path / "old")).run
    assert plan_attempt(run).changes is None
    (run.path / TOKEN_FILE).unlink()
    run.plan_path.write_text(run.plan_path.read_text().replace('"--middleware"', '"--seed"'))
    change = plan_attempt(run)
    assert change.changes is not None
    change.write(run)
    assert "--middleware" in run.plan().group(Role.ENGINE).command
    run.start_attempt()
    assert plan_attempt(run).changes is None


def test_a_run_whose_model_is_gone_is_not_resumed(tmp_path: Path) -> None:
    """Roles would say so, behind the queue. Weights are those of its versions and checkpoints."""
    model = write_tiny_model(tmp_path / "model")
    recipe, cluster = load_recipe("quickstart", overrides=[f"model.path={model}"]), load_cluster("local")
    plan = make_plan(recipe.value, cluster.value, "old", tmp_path / "old")
    (model / "model.safetensors").unlink()
    examine_attempt(recipe, cluster, plan).refuse()
    (model / "tokenizer.json").rename(tmp_path / "kept.json")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        examine_attempt(recipe, cluster, plan).refuse()
    (tmp_path / "kept.json").rename(model / "tokenizer.json")
    (model / "config.json").rename(tmp_path / "kept.json")
    with pytest.raises(ConfigError, match=r"holds no model \(no config\.json\)"):
        examine_attempt(recipe, cluster, plan).refuse()
