"""Rules of environments of verifiers, and their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError
from hpcrl.jobplan.plan import absolute_paths


def loaded(where: Path, **changes: Any) -> Any:
    settings = "".join(f"    {key}: {value}\n" for key, value in {"name": "v", "kind": "verifiers", **changes}.items())
    file = where / "recipe.yaml"
    file.write_text(f"extends: quickstart\nenvironments:\n  -\n{settings}")
    return load_recipe(str(file), [])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "neither package nor path is given"),
        ({"package": "kuhn-poker", "path": "poker"}, "package and path are given"),
        (
            {"package": "p", "time_limit_s": 10.0, "turn_timeout_s": 10.0},
            "a rollout may take 10 s, and time_limit_s is 10 s",
        ),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_rules(loaded(tmp_path, **changes), load_cluster("local"))
    assert what in str(error.value)


def test_paths_are_absolute_and_links_kept(tmp_path: Path) -> None:
    """The python of a virtual environment is a link, and is another one behind it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/usr/bin/env")
    recipe = loaded(tmp_path, path="./poker", python="bin/python").value
    (made,) = absolute_paths(recipe, tmp_path).environments
    assert (made.path, made.python) == (str(tmp_path / "poker"), str(tmp_path / "bin/python"))
    (made,) = absolute_paths(loaded(tmp_path, package="p", python="python3").value, tmp_path).environments
    assert (made.path, made.python) == (None, "python3")
