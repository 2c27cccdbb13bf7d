"""Rules about supervised runs: each broken by one change, and plans of the trainer alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from start_models import write_tiny_model

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.config.rules.sft import SFT_RULES
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError
from hpcrl.jobplan import check_sizes
from hpcrl.jobplan.plan import make_plan
from hpcrl.planning.calibration.calibration_file import Calibration
from hpcrl.planning.report import find_facts, make_outlook
from hpcrl.planning.verdict import judge

RECIPE = str(Path(__file__).parents[3] / "docs/examples/conversations/recipe.yaml")
#: rule, settings that break it, key of the finding
BROKEN = [
    ("sft-alone", ("environments=[{name: w, kind: words}]",), "sft"),
    ("sft-alone", ("rollouts.group_size=4",), "sft"),
    ("sft-alone", ("engine.replicas=2",), "sft"),
    ("sft-alone", ("trainer.router_replay=true",), "trainer.router_replay"),
    ("sft-source", ("sft.data=null",), "sft.data"),
    ("sft-source", ("sft.hub=a/b",), "sft.data"),
    ("sft-source", ("sft.revision=main",), "sft.revision"),
    ("sft-split", ("sft.split_column=split",), "sft.split_column"),
    ("sft-split", ("sft.held_out_values=[train]",), "sft.held_out_values"),
    ("sft-micro-batch", ("sft.max_len=2000",), "trainer.micro_batch_tokens"),
    ("sft-layout", ("job.layout=elastic",), "job.layout"),
]


def findings(*settings: str, recipe: str = RECIPE, cluster: str = "local") -> list[tuple[str, str]]:
    """Name of the rule and key of each conflict."""
    try:
        check_rules(load_recipe(recipe, settings), load_cluster(cluster))
    except ConfigError as error:
        return [(f.what.rpartition("[")[2].rstrip("]"), f.key) for f in error.findings]
    return []


@pytest.mark.parametrize("cluster", ["local", "h200-28"])
def test_the_example_is_right_and_rules_are_silent_about_others(cluster: str) -> None:
    assert findings(cluster=cluster) == []
    assert findings(recipe="quickstart", cluster=cluster) == []


@pytest.mark.parametrize(("rule", "settings", "key"), BROKEN)
def test_each_rule_can_be_broken(rule: str, settings: tuple[str, ...], key: str) -> None:
    assert (rule, key) in findings(*settings)


def test_all_rules_are_tried() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule.name for rule in SFT_RULES}


def test_settings_of_engines_are_not_asked_for() -> None:
    # a rollout of engine.max_model_len tokens would not fit
    assert findings("trainer.micro_batch_tokens=64", "sft.max_len=64") == []
    assert findings("trainer.micro_batch_tokens=64", recipe="quickstart") != []


def test_a_recipe_without_conversations_needs_environments() -> None:
    with pytest.raises(ConfigError, match="environments: there must be at least 1 environment"):
        load_recipe("quickstart", ["environments=[]"])
    with pytest.raises(ConfigError, match="environments: is required"):
        load_recipe(RECIPE, ["sft=null"])


@pytest.mark.parametrize(("cluster", "layout"), [("local", "local"), ("h200-28", "single")])
def test_a_plan_is_of_the_trainer_alone(tmp_path: Path, cluster: str, layout: str) -> None:
    model = write_tiny_model(tmp_path / "model")
    recipe, site = load_recipe(RECIPE, [f"model.path={model}", "trainer.ranks=4"]), load_cluster(cluster)
    plan = make_plan(recipe.value, site.value, "run", tmp_path / "run")
    assert [group.role for group in plan.groups] == [Role.TRAINER]
    assert plan.groups[0].after == ()
    assert plan.groups[0].policy.ends_run
    assert plan.layout.kind == layout
    assert [component.nodes for component in plan.layout.components] == [1] * (layout == "single")
    facts = find_facts(recipe.value)
    outlook = make_outlook(recipe.value, site.value, Calibration(), facts)
    assert outlook.memory is not None
    assert {place.role for place in outlook.memory.places} == {Role.TRAINER}
    assert not any(t.name in ("engines", "orchestrator") for p in outlook.memory.places for t in p.ledger.terms)
    assert judge(outlook, facts).fits
    check_sizes(recipe, site)
    with pytest.raises(ConfigError, match=r"sft\.max_len: 5000 is more than the 4096 positions"):
        check_sizes(load_recipe(RECIPE, [f"model.path={model}", "sft.max_len=5000"]), site)
