"""Who wins where a profile, a recipe or a template lies in the current directory: not that directory."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from hpcrl.config.resources import find_cluster, find_recipe, list_clusters, package_data, template_dirs
from hpcrl.errors import ConfigError


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory and a user's configuration of their own."""
    (tmp_path / "here/clusters").mkdir(parents=True)
    (tmp_path / "config/hpcrl/clusters").mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_the_users_profile_wins_and_it_is_reported(places: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = places / "config/hpcrl/clusters/site.yaml"
    for path in (mine, Path("clusters/site.yaml")):
        path.write_text("")
    assert find_cluster("site") == mine
    (said,) = caplog.messages
    assert f"taken from {mine}; clusters/site.yaml of the current directory is not used" in said
    caplog.clear()
    assert find_cluster("clusters/site.yaml") == Path("clusters/site.yaml")
    assert find_cluster("./clusters/site.yaml") == Path("clusters/site.yaml")
    assert not caplog.messages, "asked for by its path"


def test_the_packages_profile_wins_too(caplog: pytest.LogCaptureFixture) -> None:
    Path("clusters/local.yaml").write_text("")
    assert find_cluster("local") == package_data("clusters") / "local.yaml"
    assert "clusters/local.yaml of the current directory is not used" in caplog.text


def test_a_profile_of_this_directory_is_found_last_and_named(caplog: pytest.LogCaptureFixture) -> None:
    Path("clusters/new.yaml").write_text("")
    assert find_cluster("new") == list_clusters()["new"] == Path("clusters/new.yaml")
    assert caplog.messages == ["cluster profile new: taken from clusters/new.yaml in the current directory"]
    assert caplog.records[0].levelno == logging.WARNING


def test_in_the_checkout_there_is_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(package_data("clusters").parent)
    assert find_cluster("local").resolve() == package_data("clusters") / "local.yaml"
    assert find_cluster("clusters/local.yaml") == Path("clusters/local.yaml")
    assert not caplog.messages


def test_a_name_is_not_a_file_of_this_directory() -> None:
    for name in ("quickstart", "local", "other"):
        Path(name).write_text("")
    assert find_recipe("quickstart") == package_data("recipes") / "quickstart.yaml"
    assert find_cluster("local") == package_data("clusters") / "local.yaml"
    with pytest.raises(ConfigError, match="no recipe of this name"):
        find_recipe("other")
    assert find_recipe("./other") == Path("other")


@pytest.mark.parametrize("name", ["rl.toml", "./rl.toml", "run.sh"])
def test_a_file_of_another_system_is_recognised(name: str) -> None:
    Path(name).write_text("max_steps = 1\n")
    with pytest.raises(ConfigError, match=rf"(?s)another system.*hpcrl recipe import {re.escape(name)}"):
        find_recipe(name)


def test_templates_of_this_directory_are_not_read() -> None:
    Path("templates/sbatch").mkdir(parents=True)
    assert Path("templates/sbatch").resolve() not in [path.resolve() for path in template_dirs()]
