"""Rules of software-engineering tasks: summaries have room, and branches."""

from __future__ import annotations

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.summaries import SWE_RULES
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError

ENVIRONMENT = "environments=[{{name: swe, kind: swe, tasks: tasks.jsonl, {}}}]"
BROKEN = [
    ("summary-points", "summary_points: [800, 400]", (), "summary_points"),
    ("summary-room", "summary_points: [2000]", (), "summary_points"),
    ("summary-room", "summary_points: [10], summary_room_tokens: 2048", (), "summary_room_tokens"),
    ("summary-branches", "summary_points: [800], max_summaries: 16", (), "max_summaries"),
    ("summary-branches", "summary_points: [800], max_summaries: 8", ("model.chat.thinking=cut",), "max_summaries"),
]
ALLOWED = [
    ("max_turns: 3", ()),
    ("summary_room_tokens: 100000, max_summaries: 100", ()),
    ("summary_points: [400, 400, 1848], summary_room_tokens: 200, max_summaries: 15", ()),
    ("summary_points: [800], max_summaries: 7", ("model.chat.thinking=cut",)),
]


def findings(own: str, *settings: str) -> list[tuple[str, str]]:
    """Name of the rule and key of each conflict."""
    small = () if "summary_room_tokens" in own else ("summary_room_tokens: 200",)
    environment = ENVIRONMENT.format(", ".join([own, *small]))
    names = {rule.name for rule in SWE_RULES}
    try:
        recipe = load_recipe("quickstart", [environment, "engine.max_model_len=2048", *settings])
        check_rules(recipe, load_cluster("local"))
    except ConfigError as error:
        found = [(f.what.rpartition("[")[2].rstrip("]"), f.key) for f in error.findings]
        return [one for one in found if one[0] in names]
    return []


@pytest.mark.parametrize(("rule", "own", "settings", "key"), BROKEN)
def test_each_rule_names_its_key(rule: str, own: str, settings: tuple[str, ...], key: str) -> None:
    assert findings(own, *settings) == [(rule, f"environments.0.{key}")]


@pytest.mark.parametrize(("own", "settings"), ALLOWED)
def test_other_settings_are_right(own: str, settings: tuple[str, ...]) -> None:
    assert findings(own, *settings) == []
