"""Rules of sampling: what training must not do, and what has no effect."""

from __future__ import annotations

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.sampling import SAMPLING_RULES
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError

#: rule, settings that break it, key of the finding
BROKEN = [
    ("sampling-is-whole", ("rollouts.sampling.top_p=0.95",), "rollouts.sampling.top_p"),
    ("sampling-is-whole", ("rollouts.sampling.top_k=20",), "rollouts.sampling.top_k"),
    ("sampling-is-whole", ("rollouts.sampling.min_p=0.01",), "rollouts.sampling.min_p"),
    ("greedy-draws-nothing", ("evaluation.sampling.top_p=0.9",), "evaluation.sampling.top_p"),
    ("greedy-draws-nothing", ("evaluation.sampling.seed=3",), "evaluation.sampling.seed"),
    ("greedy-draws-nothing", ("evaluation.sampling.temperature=0.001",), "evaluation.sampling.temperature"),
    ("answer-fits-context", ("rollouts.sampling.max_new_tokens=4096",), "rollouts.sampling.max_new_tokens"),
    ("answer-fits-context", ("evaluation.sampling.max_new_tokens=4096",), "evaluation.sampling.max_new_tokens"),
]
ALLOWED = [
    (),
    ("rollouts.sampling={top_p: 1.0, top_k: 0, min_p: 0.0, temperature: 0.6, seed: 7, stop: ['</answer>', END]}",),
    ("evaluation.sampling={temperature: 0.6, top_p: 0.95, top_k: 20, min_p: 0.01, seed: 3}",),
    ("evaluation.sampling={temperature: 0.01}",),
    ("evaluation.sampling={temperature: 0.0, stop: [END], stop_token_ids: [3], max_new_tokens: 8}",),
]


def findings(*settings: str) -> list[tuple[str, str, str]]:
    """Name of the rule, key and hint of each conflict."""
    names = {rule.name for rule in SAMPLING_RULES}
    try:
        check_rules(load_recipe("quickstart", settings), load_cluster("local"))
    except ConfigError as error:
        found = [(f.what.rpartition("[")[2].rstrip("]"), f.key, f.hint) for f in error.findings]
        return [one for one in found if one[0] in names]
    return []


@pytest.mark.parametrize(("rule", "settings", "key"), BROKEN)
def test_each_rule_names_its_key_and_a_way_out(rule: str, settings: tuple[str, ...], key: str) -> None:
    (found,) = findings(*settings)
    assert found[:2] == (rule, key)
    assert found[2]


@pytest.mark.parametrize("settings", ALLOWED)
def test_other_settings_are_right(settings: tuple[str, ...]) -> None:
    assert findings(*settings) == []


def test_held_out_rollouts_take_what_they_do_not_say_from_training() -> None:
    training = "rollouts.sampling={max_new_tokens: 9, stop: [A], stop_token_ids: [4], seed: 5, temperature: 0.8}"
    recipe = load_recipe("quickstart", [training]).value
    whole = recipe.evaluation.sampling.beside(recipe.rollouts.sampling)
    assert (whole.temperature, whole.max_new_tokens, whole.stop, whole.stop_token_ids) == (0.0, 9, ("A",), (4,))
    assert whole.seed is None
    own = "evaluation.sampling={max_new_tokens: 7, stop: [], stop_token_ids: [5], temperature: 0.5, top_k: 3, seed: 1}"
    recipe = load_recipe("quickstart", [training, own]).value
    whole = recipe.evaluation.sampling.beside(recipe.rollouts.sampling)
    assert (whole.temperature, whole.max_new_tokens, whole.stop, whole.stop_token_ids) == (0.5, 7, (), (5,))
    assert (whole.top_k, whole.seed) == (3, 1)


@pytest.mark.parametrize(
    "setting",
    ["rollouts.sampling.stop=['']", "rollouts.sampling.top_p=0", "evaluation.sampling.top_p=1.1",
     "evaluation.sampling.min_p=-0.1", "rollouts.sampling.temperature=2.5", "rollouts.sampling.stop_token_ids=[-1]"],
)  # fmt: skip
def test_values_that_engines_refuse_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        load_recipe("quickstart", [setting])
