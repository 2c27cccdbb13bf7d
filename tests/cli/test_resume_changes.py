"""``hpcrl resume --set``: what of a run's recipe may change between two attempts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpcrl.config.load import load_recipe
from hpcrl.errors import ConfigError
from hpcrl.planning import change_recipe


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
    with pytest.raises(ConfigError, match=r"cannot change in a run that has checkpoints\n.*way out: submit a new run"):
        change_recipe(recipe_path, ["trainer.ranks=4", override])


def test_a_wrong_override_is_refused(recipe_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.rank"):
        change_recipe(recipe_path, ["trainer.rank=4"])
