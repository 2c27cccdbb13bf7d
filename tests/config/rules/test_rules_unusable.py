"""Rules where one value of a recipe or profile could not be read: they say nothing of it, and never fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from pydantic import BaseModel
from value_paths import paths_of

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.resources import list_clusters, list_recipes
from hpcrl.config.rules.table import RULES, SITE_RULES
from hpcrl.config.unusable_values import UNUSABLE, UnusableValueError, usable_findings, with_unusable


def check_all(rules: Iterable[Any], damaged: Iterable[tuple[tuple[Any, ...], tuple[BaseModel, ...]]]) -> None:
    count = 0
    for path, configurations in damaged:
        for rule in rules:
            count += 1
            try:
                list(usable_findings(rule.check, *configurations))
            except Exception as error:
                error.add_note(f"rule {rule.name} without a value of {'.'.join(map(str, path))}")
                raise
    assert count > 200


@pytest.mark.parametrize("name", sorted(list_recipes()))
def test_no_rule_fails_where_one_value_of_a_recipe_is_unusable(name: str) -> None:
    recipe = load_recipe(name).value
    site = load_cluster("h200-28" if recipe.trainer.nodes > 1 or recipe.engine.nodes > 1 else "local").value
    paths = paths_of(recipe.model_dump(mode="json"))
    check_all(RULES, ((path, (with_unusable(recipe, path), site)) for path in paths))


@pytest.mark.parametrize("name", sorted(list_clusters()))
def test_no_rule_fails_where_one_value_of_a_profile_is_unusable(name: str) -> None:
    site = load_cluster(name).value
    recipe = load_recipe("quickstart" if site.kind == "local" else "glm5_swe").value
    damaged = [(path, with_unusable(site, path)) for path in paths_of(site.model_dump(mode="json"))]
    check_all(SITE_RULES, ((path, (place,)) for path, place in damaged))
    check_all(RULES, ((path, (recipe, place)) for path, place in damaged))


@pytest.mark.parametrize(
    "use", [lambda: UNUSABLE.field, lambda: type(UNUSABLE).model_fields, lambda: UNUSABLE + 1, lambda: len(UNUSABLE)]
)
def test_every_use_is_refused(use: Callable[[], Any]) -> None:
    with pytest.raises(UnusableValueError):
        use()


def test_the_class_has_only_names_of_python() -> None:
    assert not hasattr(type(UNUSABLE), "__absent__")
