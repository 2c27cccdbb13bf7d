"""Sets of held-out prompts in a recipe: what is allowed, and what is told of what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError

RECIPE = """\
extends: quickstart
name: mine
evaluation:
  sets:
    - {name: greedy}
    - {name: words, environments: [reverse], prompts: 16, samples: 8, temperature: 1.0, every_steps: 20}
"""


def problems(path: Path, text: str) -> list[str]:
    (path / "mine.yaml").write_text(text)
    try:
        check_rules(load_recipe(str(path / "mine.yaml")), load_cluster("local"))
    except ConfigError as error:
        return [f"{finding.key}: {finding.what}" for finding in error.findings]
    return []


def test_sets_have_defaults(tmp_path: Path) -> None:
    assert problems(tmp_path, RECIPE) == []
    greedy, words = load_recipe(str(tmp_path / "mine.yaml")).value.evaluation.sets
    assert (greedy.environments, greedy.samples, greedy.temperature, greedy.every_steps) == (None, 1, 0.0, None)
    assert (words.environments, words.samples, words.temperature, words.every_steps) == (("reverse",), 8, 1.0, 20)
    assert load_recipe("quickstart").value.evaluation.sets == ()


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("name: words", "name: greedy", "evaluation.sets.1.name: another set is called 'greedy'"),
        ("[reverse]", "[revers]", "evaluation.sets.1.environments: there is no environment 'revers'"),
        ("[reverse]", "[reverse, reverse]", "evaluation.sets.1.environments: an environment is named twice"),
        ("[reverse]", "[]", "evaluation.sets.1.environments"),
        ("{name: greedy}", "{name: greedy, prompts: 1}", "evaluation.sets.0.prompts: 1 prompts for 2 environments"),
        ("temperature: 1.0", "temperature: 0", "evaluation.sets.1.samples: 8 samples of a prompt at temperature 0"),
        ("temperature: 1.0", "temperature: 0.001", "evaluation.sets.1.temperature: must be 0 (greedy), or at least"),
        ("temperature: 1.0", "temperature: -1", "evaluation.sets.1.temperature"),
        ("samples: 8", "sample: 8", "evaluation.sets.1.sample"),
        ("samples: 8", "samples: 0", "evaluation.sets.1.samples"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, before: str, after: str, problem: str) -> None:
    found = problems(tmp_path, RECIPE.replace(before, after))
    assert any(each.startswith(problem) for each in found), found
