"""Sets of held-out prompts in a recipe: what is allowed, and what is told of what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpcrl.config.evaluation import EvaluationSetConfig
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.config.sampling import EvaluationSampling, SamplingConfig, SetSampling
from hpcrl.errors import ConfigError
from hpcrl.runs.rundir import RunDir

RECIPE = """\
extends: quickstart
name: mine
evaluation:
  sets:
    - {name: greedy}
    - {name: words, environments: [reverse], prompts: 16, samples: 8, sampling: {temperature: 1.0}, every_steps: 20}
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
    assert (greedy.environments, greedy.samples, greedy.sampling, greedy.every_steps) == (None, 1, SetSampling(), None)
    assert (words.environments, words.samples, words.every_steps) == (("reverse",), 8, 20)
    assert words.sampling == SetSampling(temperature=1.0)
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
        ("temperature: 1.0", "temperature: 0.001", "evaluation.sets.1.sampling.temperature: must be 0"),
        ("temperature: 1.0", "temperature: -1", "evaluation.sets.1.sampling.temperature"),
        ("temperature: 1.0", "temperature: 0, top_p: 0.9", "evaluation.sets.1.sampling.top_p: has no effect at"),
        (
            "temperature: 1.0",
            "max_new_tokens: 4096",
            "evaluation.sets.1.sampling.max_new_tokens: 4096 leaves no tokens",
        ),
        ("sampling: {", "temperature: 1, sampling: {", "evaluation.sets.1: temperature is a key of sampling"),
        ("samples: 8", "sample: 8", "evaluation.sets.1.sample"),
        ("samples: 8", "samples: 0", "evaluation.sets.1.samples"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, before: str, after: str, problem: str) -> None:
    found = problems(tmp_path, RECIPE.replace(before, after))
    assert any(each.startswith(problem) for each in found), found


def test_a_set_draws_as_evaluation_does_where_it_says_nothing() -> None:
    evaluation = EvaluationSampling(temperature=0.6, top_p=0.95, stop=("END",))
    sampling = SetSampling(temperature=1.0, top_k=20).beside(evaluation)
    assert sampling == EvaluationSampling(temperature=1.0, top_p=0.95, top_k=20, stop=("END",))
    whole = sampling.beside(SamplingConfig(max_new_tokens=64, seed=3))
    assert (whole.temperature, whole.top_p, whole.top_k, whole.stop) == (1.0, 0.95, 20, ("END",))
    assert (whole.max_new_tokens, whole.seed) == (64, None)


def test_settings_of_evaluation_serve_sets_that_draw(tmp_path: Path) -> None:
    """Also where ``evaluation`` itself is greedy, and they have no effect on it."""
    given = RECIPE.replace("  sets:", "  sampling: {top_p: 0.9}\n  sets:")
    assert problems(tmp_path, given) == []
    found = problems(tmp_path, given.replace("samples: 8, sampling: {temperature: 1.0}", "samples: 1"))
    assert found == [
        "evaluation.sampling.top_p: has no effect at temperature 0, which takes the most likely token "
        "[greedy-draws-nothing]"
    ]


def test_a_temperature_of_an_earlier_recipe_is_read(tmp_path: Path) -> None:
    earlier = RECIPE.replace("sampling: {temperature: 1.0}", "temperature: 1.0")
    assert problems(tmp_path, earlier) == []
    assert load_recipe(str(tmp_path / "mine.yaml")).value.evaluation.sets[1].sampling == SetSampling(temperature=1.0)


def test_a_run_of_the_earlier_form_is_read(tmp_path: Path) -> None:
    """Its recipe names every value, so that a greedy set stays one."""
    tree = load_recipe("quickstart").value.model_dump(mode="json")
    earlier = {**EvaluationSetConfig(name="hard", samples=1).model_dump(mode="json"), "temperature": 0.0}
    del earlier["sampling"]
    tree["evaluation"] |= {"sampling": {"temperature": 0.7}, "sets": [earlier]}
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.recipe_path.write_text(yaml.safe_dump(tree))
    evaluation = run.recipe().evaluation
    assert evaluation.sets[0].sampled(evaluation.sampling).temperature == 0.0
    assert evaluation.sampling.temperature == 0.7


BENCHMARK = """\
extends: quickstart
name: mine
environments:
  - {name: reverse, kind: words}
  - {name: sort, kind: words, task: sort, weight: 0}
evaluation:
  prompts: 1
  sets:
    - {name: benchmark, environments: [sort], prompts: 16}
    - {name: others, prompts: 1}
"""


def test_an_environment_may_be_for_evaluation_alone(tmp_path: Path) -> None:
    """It counts neither among the prompts of ``evaluation`` nor among those of a set that names none."""
    assert problems(tmp_path, BENCHMARK) == []
    (found,) = problems(tmp_path, BENCHMARK.replace("words}", "words, weight: 0}"))
    assert found == "environments: all have weight 0, and such environments are not trained on [environments-train]"
    (found,) = problems(tmp_path, BENCHMARK.replace("weight: 0", "weight: -1"))
    assert found.startswith("environments.1.weight")
