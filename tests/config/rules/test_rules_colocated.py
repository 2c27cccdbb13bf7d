"""Rules about engines that take turns with the trainer: each broken by one change, each has a hint."""

from __future__ import annotations

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.colocated import COLOCATED_RULES
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError, UsageError
from hpcrl.jobplan.groups import make_groups
from hpcrl.jobplan.plan import make_plan
from hpcrl.planning.report import find_facts

RECIPE = "quickstart_colocated"
SIDE = "{replicas: 1, nodes: 1}"

#: rule, settings that break it, key of the finding
BROKEN = [
    ("colocated-one-place", (f"engine.prefill={SIDE}", f"engine.decode={SIDE}"), "engine.prefill"),
    ("colocated-one-place", ("engine.kv_store={segment_gib: 1.0}",), "engine.kv_store"),
    ("colocated-one-place", ("job.layout=elastic",), "job.layout"),
    ("colocated-one-place", ("engine.nodes=2",), "engine.nodes"),
    ("colocated-one-place", ("trainer.nodes=2", "trainer.ranks=2"), "trainer.nodes"),
    ("colocated-one-place", ("engine.router.kind=vllm-router",), "engine.router.kind"),
    ("colocated-backend", ("engine.backend=vllm",), "engine.backend"),
    ("colocated-turns", ("rollouts.max_off_policy_steps=2",), "rollouts.max_off_policy_steps"),
    ("colocated-turns", ("rollouts.order=deterministic",), "rollouts.order"),
    ("colocated-turns", ("engine.pause=none",), "engine.pause"),
    ("colocated-memory", ("handoff.kind=fp8",), "handoff.kind"),
    ("colocated-memory", ("handoff.delta_chain=3",), "handoff.delta_chain"),
    ("colocated-memory", ("handoff.transport=fabric",), "handoff.transport"),
    ("colocated-trainer", ("trainer.memory.parameter_offload=true",), "trainer.memory.parameter_offload"),
    ("colocated-trainer", ("trainer.lora={}",), "trainer.lora"),
    ("colocated-trainer", ("algorithm.kl={coefficient: 0.1}",), "algorithm.kl"),
]


def findings(*settings: str, recipe: str = RECIPE, cluster: str = "local") -> list[tuple[str, str, str]]:
    """Name of the rule, key and hint of each conflict with the rules of this table."""
    names = {rule.name for rule in COLOCATED_RULES}
    try:
        check_rules(load_recipe(recipe, settings), load_cluster(cluster))
    except ConfigError as error:
        found = [(f.what.rpartition("[")[2].rstrip("]"), f.key, f.hint) for f in error.findings]
        return [one for one in found if one[0] in names]
    return []


def test_the_recipe_itself_is_right_and_rules_are_silent_about_others():
    assert findings() == []
    assert findings("rollouts.max_off_policy_steps=1") == []
    assert findings("rollouts.order=deterministic", recipe="quickstart") == []


def test_an_engine_on_processors_does_not_take_turns_with_gpus_unless_that_is_meant():
    """The embedded engine computes on processors alone, and a whole turn of GPUs would wait for it."""
    (found,) = findings(cluster="h200-28")
    assert found[:2] == ("colocated-device", "engine.placement")
    assert "engine.device: cpu" in found[2]
    assert findings("engine.device=cpu", cluster="h200-28") == []
    assert findings(recipe="quickstart", cluster="h200-28") == []


@pytest.mark.parametrize(("rule", "settings", "key"), BROKEN, ids=[f"{rule}-{key}" for rule, _, key in BROKEN])
def test_what_needs_engines_apart_is_refused_by_name(rule, settings, key):
    found = findings(*settings)
    assert (rule, key) in [one[:2] for one in found]
    assert all(hint for _, _, hint in found)


def test_every_rule_is_broken_here():
    # the last is about a site, and has a test of its own
    assert {rule for rule, _, _ in BROKEN} | {"colocated-device"} == {rule.name for rule in COLOCATED_RULES}


def test_engines_start_before_the_trainer_and_are_not_restarted_alone():
    groups = {
        group.role.value: group for group in make_groups(load_recipe(RECIPE).value, load_cluster("local").value, "run")
    }
    assert groups["trainer"].after == ("engine",)
    assert groups["engine"].policy.restart == "never"
    assert "--colocated" in groups["engine"].command


def test_on_a_cluster_they_have_the_trainers_node(tmp_path):
    plan = make_plan(load_recipe(RECIPE).value, load_cluster("h200-28").value, "run", tmp_path)
    assert [(component.roles, component.nodes) for component in plan.layout.components] == [(("trainer",), 1)]
    (engine,) = [group for group in plan.groups if group.role.value == "engine"]
    assert (engine.beside, engine.component, engine.first_node) == (True, 0, 0)


def test_the_planner_says_that_it_has_no_terms():
    with pytest.raises(UsageError, match=r"engine\.placement: colocated[^$]*hint: "):
        find_facts(load_recipe(RECIPE).value)
