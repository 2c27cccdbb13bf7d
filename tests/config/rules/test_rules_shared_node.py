"""Rules about trainer and engines on one node: each broken by one change."""

from __future__ import annotations

import pytest

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.shared_node import SHARED_NODE_RULES
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError

RECIPE = "qwen3_30b_a3b_node"
SIDE = "{replicas: 1, nodes: 1}"

#: rule, settings that break it, key of the finding
BROKEN = [
    ("shared-node", ("trainer.nodes=2",), "trainer.nodes"),
    ("shared-node", ("engine.nodes=2",), "engine.nodes"),
    ("shared-node", (f"engine.prefill={SIDE}", f"engine.decode={SIDE}"), "engine.prefill"),
    ("shared-node", ("job.layout=elastic",), "job.layout"),
    ("shared-node-parts", ("trainer.ranks=8",), "trainer.ranks"),
    ("shared-node-parts", ("engine.replicas=3",), "engine.replicas"),
    ("shared-node-parts", ("engine.backend=embedded", "engine.replicas=200"), "trainer.ranks"),
    ("shared-node", ("engine.placement=shared_gpus", "trainer.nodes=2"), "trainer.nodes"),
    ("shared-gpus", ("engine.placement=shared_gpus", "engine.backend=embedded"), "engine.backend"),
    ("shared-gpus", ("engine.placement=shared_gpus", "engine.device=cpu"), "engine.device"),
    ("shared-gpus", ("engine.placement=shared_gpus", "trainer.ranks=16"), "trainer.ranks"),
    ("shared-gpus", ("engine.placement=shared_gpus", "engine.replicas=3"), "engine.replicas"),
    # four GPUs of an engine are what its degrees divide, not the eight of its node
    ("replica-size", ("engine.tp=8",), "engine.tp"),
]


def findings(*settings: str, recipe: str = RECIPE) -> list[tuple[str, str]]:
    """Name of the rule and key of each conflict."""
    try:
        check_rules(load_recipe(recipe, settings), load_cluster("h200-28"), planning=True)
    except ConfigError as error:
        return [(f.what.rpartition("[")[2].rstrip("]"), f.key) for f in error.findings]
    return []


def test_the_recipe_is_right_and_rules_are_silent_about_others() -> None:
    assert findings() == []
    assert findings("engine.replicas=2", "engine.tp=2") == []
    # eight ranks leave no GPU to others, and share all of them
    assert findings("engine.placement=shared_gpus", "trainer.ranks=8", "engine.replicas=4", "engine.tp=2") == []
    assert findings("trainer.ranks=16", recipe="qwen3_30b_a3b") == []


@pytest.mark.parametrize(("rule", "settings", "key"), BROKEN, ids=[f"{rule}-{key}" for rule, _, key in BROKEN])
def test_what_is_not_one_node_is_refused(rule: str, settings: tuple[str, ...], key: str) -> None:
    assert (rule, key) in findings(*settings)


def test_one_node_of_one_partition_is_enough() -> None:
    """Engines add no nodes; they are in the trainer's partition."""
    site = load_cluster("h200-28")
    whole = site.value.model_dump()
    whole["partitions"]["gpu"]["nodes"] = 1
    whole["partitions"]["gpu"]["block_nodes"] = None
    whole["partitions"]["other"] = whole["partitions"]["gpu"]
    one = type(site.value).model_validate(whole)

    def found(cluster: ClusterProfile, recipe: Recipe) -> list[str]:
        return [key for rule in SHARED_NODE_RULES for key, _ in rule.check(recipe, cluster)]

    recipe = load_recipe(RECIPE)
    check_rules(recipe, type(site)(one, site.source, site.origins))
    whole["placement"]["by_role"] = {"engine": "other"}
    assert found(type(site.value).model_validate(whole), recipe.value) == ["job.partition"]
