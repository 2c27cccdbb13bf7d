"""What nobody has filled in is refused, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.resources import list_clusters, list_recipes
from hpcrl.errors import ConfigError

SITE = {
    "paths.runs_root": 'extends: local\npaths: {runs_root: "WORD"}',
    "paths.cache": 'extends: h200-28\npaths: {cache: "/shared/WORD/cache"}',
    "partitions.gpu.account": 'extends: h200-28\npartitions: {gpu: {account: "WORD"}}',
    "partitions.gpu.node.interface": 'extends: h200-28\npartitions: {gpu: {node: {interface: "WORD"}}}',
    "env.FOO": 'extends: local\nenv: {FOO: "a:WORD"}',
    "python_by_role.trainer": 'extends: local\npython_by_role: {trainer: "WORD/bin/python"}',
    "launch.modules.1": 'extends: h200-28\nlaunch: {modules: [cuda, "WORD"]}',
}
WORDS = ("CHANGE_ME", "change_me", "ChangeMe", "<change me>", "<your account>", "TODO", "FIXME", "replace-me", "<path>")


@pytest.mark.parametrize("key", SITE)
@pytest.mark.parametrize("word", WORDS)
def test_every_field_of_a_profile(tmp_path: Path, key: str, word: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SITE[key].replace("WORD", word))
    with pytest.raises(ConfigError, match="still to be filled in") as refused:
        load_cluster(str(path))
    assert [finding.key for finding in refused.value.findings if "filled in" in finding.what] == [key]


def test_keys_are_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: local\nenv: {CHANGE_ME: there}")
    with pytest.raises(ConfigError, match=r"env\.CHANGE_ME: is still to be filled in"):
        load_cluster(str(path))


@pytest.mark.parametrize("word", ["CHANGE_ME", "<change me>"])
def test_recipes(tmp_path: Path, word: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: quickstart\nmodel: {{path: '{word}'}}\n")
    with pytest.raises(ConfigError, match=r"model\.path: is still to be filled in"):
        load_recipe(str(path))


def test_what_only_looks_so_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: local\ndescription: TODO nothing\npaths: {runs_root: /home/ann/todo/exchange_menu}\n")
    assert load_cluster(str(path)).value.paths.runs_root == "/home/ann/todo/exchange_menu"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("extends: quickstart\ndescription: a TODO list\n")
    load_recipe(str(recipe))
    for name in list_clusters():
        load_cluster(name)
    for name in list_recipes():
        load_recipe(name)
