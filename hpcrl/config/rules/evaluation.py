"""Rules about sets of held-out prompts."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.environments import trained_on
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule


def _sets_have_prompts(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    known = [environment.name for environment in recipe.environments]
    trained = [environment.name for environment in trained_on(recipe.environments)]
    names = [each.name for each in recipe.evaluation.sets]
    for number, each in enumerate(recipe.evaluation.sets):
        key = f"evaluation.sets.{number}"
        if names.index(each.name) != number:
            yield f"{key}.name", f"another set is called {each.name!r}"
        chosen = trained if each.environments is None else list(each.environments)
        for name in chosen:
            if name not in known:
                yield f"{key}.environments", f"there is no environment {name!r}; there are {', '.join(known)}"
        if len(set(chosen)) < len(chosen):
            yield f"{key}.environments", "an environment is named twice"
        if each.prompts < len(chosen):
            yield f"{key}.prompts", f"{each.prompts} prompts for {len(chosen)} environments"


def _something_is_trained_on(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.environments and not trained_on(recipe.environments):
        yield "environments", "all have weight 0, and such environments are not trained on"


def _samples_differ(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for number, each in enumerate(recipe.evaluation.sets):
        if each.samples > 1 and each.sampled(recipe.evaluation.sampling).temperature == 0.0:
            key = f"evaluation.sets.{number}.samples"
            yield key, f"{each.samples} samples of a prompt at temperature 0 are one and the same"


EVALUATION_RULES: tuple[Rule, ...] = (
    Rule(
        "environments-train",
        "At least one environment is trained on.",
        "give one of them a weight above 0",
        _something_is_trained_on,
    ),
    Rule(
        "evaluation-sets",
        "Sets of held-out prompts have names of their own, and prompts of each of their environments.",
        "name environments of the recipe, once each, and give the set at least one prompt of each",
        _sets_have_prompts,
    ),
    Rule(
        "evaluation-samples",
        "Several samples of a prompt are drawn at a temperature.",
        "set sampling.temperature of the set, for example 1.0, or samples: 1",
        _samples_differ,
    ),
)
