"""A user's own profile on top of the site's: account, quality of service and paths, and all else as the site says."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster
from hpcrl.config.resources import package_data
from hpcrl.errors import ConfigError

OVERLAY = """\
extends: devcluster
partitions: {gpu: {account: rl-team, qos: high}}
paths: {runs_root: /shared/me/runs}
"""


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's profiles, and an empty current directory."""
    (tmp_path / "here").mkdir()
    path = tmp_path / "config/hpcrl/clusters"
    path.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path / "here")
    return path


def test_an_overlay_of_the_same_name_is_on_top_of_the_sites(profiles: Path) -> None:
    mine = profiles / "devcluster.yaml"
    mine.write_text(OVERLAY)
    loaded, below = load_cluster("devcluster"), load_cluster(str(package_data("clusters") / "devcluster.yaml"))
    site, plain = loaded.value, below.value
    assert isinstance(site, SlurmCluster)
    assert isinstance(plain, SlurmCluster)
    assert (site.partitions["gpu"].account, site.partitions["gpu"].qos) == ("rl-team", "high")
    assert site.paths.runs_root == "/shared/me/runs"
    # and nothing else differs
    partition = site.partitions["gpu"].model_copy(update={"account": None, "qos": None})
    assert site.model_copy(update={"partitions": {"gpu": partition}, "paths": plain.paths}) == plain
    assert loaded.where("partitions.gpu.account") == f"{mine}:2"
    assert loaded.where("partitions.gpu.nodes").startswith(str(package_data("clusters") / "devcluster.yaml"))


def test_an_overlay_may_have_a_name_of_its_own(profiles: Path) -> None:
    (profiles / "mine.yaml").write_text(OVERLAY)
    assert load_cluster("mine").value.name == "mine"
    # one that says a wrong name is told
    (profiles / "mine.yaml").write_text(f"name: other\n{OVERLAY}")
    with pytest.raises(ConfigError, match=r"is 'other', but the file is called 'mine\.yaml'"):
        load_cluster("mine")


def test_of_one_that_extends_an_overlay_each_says_its_part(profiles: Path) -> None:
    (profiles / "devcluster.yaml").write_text(OVERLAY)
    (profiles / "night.yaml").write_text("extends: devcluster\npartitions: {gpu: {qos: night}}\n")
    site = load_cluster("night").value
    assert isinstance(site, SlurmCluster)
    assert (site.partitions["gpu"].account, site.partitions["gpu"].qos) == ("rl-team", "night")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("extends: mine\n", "no other cluster profile of this name"),
        ("extends: h200\n", "no cluster profile of this name"),
        ("extends: [devcluster]\n", "path or name of one cluster profile"),
        ("extends: ./mine.yaml\n", "is circular"),
        ("extends: devcluster\npartitions: {gpu: {acount: x}}\n", "did you mean 'account'"),
    ],
)
def test_what_is_wrong_with_an_overlay_is_reported(profiles: Path, text: str, what: str) -> None:
    (profiles / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_cluster("mine")
    assert what in str(error.value)
    assert "mine.yaml:" in str(error.value) or "circle" in what


def test_what_comes_from_this_directory_is_named(profiles: Path, caplog: pytest.LogCaptureFixture) -> None:
    (profiles / "site.yaml").write_text("extends: site\nfiles: {group: lab}\n")
    Path("clusters").mkdir()
    text = (package_data("clusters") / "local.yaml").read_text().replace("name: local", "name: site")
    Path("clusters/site.yaml").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_cluster("site").value.files.group == "lab"
    assert "taken from clusters/site.yaml in the current directory" in caplog.text


def test_a_plan_shows_what_the_overlay_says(
    profiles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (profiles / "h200-28.yaml").write_text("extends: h200-28\npartitions: {gpu: {account: mine}}\n")
    monkeypatch.setattr(sys, "argv", ["hpcrl", "plan", "quickstart", "-c", "h200-28"])
    with pytest.raises(SystemExit):
        main()
    assert f"account mine ({profiles / 'h200-28.yaml'}:2)" in " ".join(capsys.readouterr().out.split())
