"""What can be tested of virtual clusters without Slurm."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpcrl.devcluster import packages
from hpcrl.devcluster.cluster_ports import choose_cluster_ports
from hpcrl.devcluster.place import ClusterPaths, default_home
from hpcrl.devcluster.render import render_configuration
from hpcrl.devcluster.settings import ClusterSettings, Ports, Record
from hpcrl.errors import UsageError


def make_record(version: tuple[int, int] = (22, 5), **settings: object) -> Record:
    return Record(
        settings=ClusterSettings(**settings),  # type: ignore[arg-type]
        ports=Ports(controller=11000, database=11001 if settings.get("accounting") else 0, first_node=11002),
        slurm_version=version,
        created_s=0.0,
    )


def test_nodes_have_addresses_of_their_own() -> None:
    record = make_record(nodes=600)
    assert len({node.address for node in record.nodes}) == 600
    assert len({node.port for node in record.nodes}) == 600
    assert record.nodes[0].name == "dev-001"
    assert record.nodes[599].name == "dev-600"
    assert record.node("dev-251").address.endswith(".1")
    with pytest.raises(UsageError, match="dev-001 to dev-600"):
        record.node("dev-601")


def test_configuration() -> None:
    files = render_configuration(make_record(nodes=3), ClusterPaths(Path("/x/dev")), user="root")
    assert sorted(files) == ["gres.conf", "slurm.conf"]
    nodes = [line for line in files["slurm.conf"].splitlines() if line.startswith("NodeName=")]
    assert len(nodes) == 3
    assert nodes[2].startswith("NodeName=dev-003 NodeHostname=localhost NodeAddr=127.42.250.3 Port=11004 ")
    assert nodes[2].endswith("Gres=gpu:h200:8")
    assert "File=/x/dev/dev/gpu[0-7]" in files["gres.conf"]
    assert "slurmdbd" not in files["slurm.conf"]


def test_every_path_lies_in_the_directory() -> None:
    files = render_configuration(make_record(accounting=True), ClusterPaths(Path("/x/dev")), user="root")
    assert sorted(files) == ["gres.conf", "mariadb.cnf", "slurm.conf", "slurmdbd.conf"]
    for name, text in files.items():
        for line in text.splitlines():
            for word in line.replace("=", " ").replace(",", " ").split():
                if word.startswith("/") and not line.startswith("#"):
                    assert word.startswith("/x/dev/") or word == "/bin/true", f"{name}: {line}"


def test_newer_versions_and_nodes_without_gpus() -> None:
    files = render_configuration(make_record((25, 11), gpus=0), ClusterPaths(Path("/x/dev")), user="root")
    assert "CgroupPlugin=disabled" in files["cgroup.conf"]
    assert "Gres=" not in files["slurm.conf"]
    assert "Name=gpu" not in files["gres.conf"]


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "No"},
        {"name": "a-b"},
        {"nodes": 0},
        {"cpus": 3},
        {"gpus": -1},
        {"requeue_delay_s": 1},
        {"stale_s": -1.0},
    ],
)
def test_bad_settings(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ClusterSettings(**settings).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/with space/dev", "/x/a=b", "/x#y", f"/{'long' * 20}/dev"])
def test_paths_that_slurm_cannot_take(path: str) -> None:
    with pytest.raises(UsageError, match="--home"):
        ClusterPaths(Path(path)).check(longest_node="dev-001")


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        packages, "find_program", lambda name: None if name in ("munged", "slurmctld", "slurmd") else name
    )
    with pytest.raises(UsageError, match=r"sudo apt-get install munge slurm-wlm\Z"):
        packages.check_machine(accounting=False, stale=False)


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCRL_DEVCLUSTER_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_home() == Path("/data/hpcrl/devcluster")
    monkeypatch.setenv("HPCRL_DEVCLUSTER_HOME", "/elsewhere")
    assert default_home() == Path("/elsewhere")


def test_ports_are_free_and_apart() -> None:
    ports = choose_cluster_ports(28, accounting=True)
    assert ports.database == ports.controller + 1
    assert ports.first_node > ports.database


def test_its_directory_is_its_users_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        paths = ClusterPaths(tmp_path / "home/one")
        paths.create(make_record())
    finally:
        os.umask(previous)
    assert stat.S_IMODE(paths.root.stat().st_mode) == 0o700
