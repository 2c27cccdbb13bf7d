"""`model.path` as the id of a published model: found where the site has its models."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.joined import load_both


def path_of(settings: list[str]) -> str:
    recipe, _ = load_both("quickstart", "mine", settings, environ={})
    return recipe.value.model.path


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = tmp_path / "config/hpcrl/clusters/mine.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("name: mine\nkind: local\npaths: {runs_root: runs, models_root: shared}\n")
    return tmp_path


def make(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")


@pytest.mark.parametrize("given", ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B@v1.0"])
def test_an_id_is_the_directory_that_the_site_has(site: Path, given: str) -> None:
    assert path_of([f"model.path={given}"]) == given
    (site / "shared" / given).mkdir(parents=True)
    # a directory without a model is none
    assert path_of([f"model.path={given}"]) == given
    (site / "shared" / given / "config.json").write_text("{}")
    assert path_of([f"model.path={given}"]) == str(site / "shared" / given)


def test_a_directory_where_hpcrl_is_called_comes_first(site: Path) -> None:
    make(site / "shared/Qwen/Qwen3-8B")
    make(site / "Qwen/Qwen3-8B")
    assert path_of(["model.path=Qwen/Qwen3-8B"]) == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("given", ["models", "./Qwen/Qwen3-8B", "/Qwen/Qwen3-8B", "Qwen/Qwen3-8B/", "a/b/c", "../b/c"])
def test_other_paths_are_left_as_they_are(site: Path, given: str) -> None:
    make(site / "shared" / given.strip("/."))
    assert path_of([f"model.path={given}"]) == given
