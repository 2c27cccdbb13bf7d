"""Real Slurm clusters of virtual nodes. Skipped, loudly, where Slurm is not installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcrl.devcluster.dev_cluster import DevCluster, list_dev_clusters
from hpcrl.devcluster.packages import missing_programs
from hpcrl.devcluster.settings import ClusterSettings

MISSING = missing_programs()
REASON = f"no Slurm on this machine: apt-get install {' '.join(dict.fromkeys(MISSING.values()))}"
PARTS = {name: missing_programs(**{name: True}) for name in ("accounting", "stale")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("slurm")
        if marker is None:
            continue
        lacking = {**MISSING, **{k: v for part in marker.args for k, v in PARTS[part].items()}}
        if lacking:
            packages = " ".join(dict.fromkeys(lacking.values()))
            item.add_marker(pytest.mark.skip(reason=f"no Slurm on this machine: apt-get install {packages}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "no Slurm on this machine" in str(r.longrepr)]
    if skipped:
        terminalreporter.write_sep("!", f"{len(skipped)} tests with a real Slurm did NOT run: {REASON}", red=True)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the clusters of a session lie; what a failed test left is removed at its end."""
    # sockets need short paths, and pytest's are long
    home = Path(f"/tmp/hpcrl-{tmp_path_factory.getbasetemp().name}-{time.time_ns() % 10**6}")
    yield home
    _remove(list_dev_clusters(home), home)


@pytest.fixture
def make_cluster(home: Path) -> Iterator[Callable[..., DevCluster]]:
    """Make clusters that are gone after the test."""
    made: list[DevCluster] = []

    def make(name: str, **settings: object) -> DevCluster:
        cluster = DevCluster.named(name, home)
        made.append(cluster)
        cluster.up(ClusterSettings(name=name, **{"nodes": 2, **settings}))  # type: ignore[arg-type]
        return cluster

    yield make
    _remove(made, home)


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[DevCluster]:
    """Six nodes of eight GPUs for the tests of a module; each test leaves the queue empty and the nodes usable."""
    cluster = DevCluster.named("dev", home)
    cluster.up(ClusterSettings(nodes=6, grace_s=2))
    yield cluster
    _remove([cluster], home)


def _remove(clusters: list[DevCluster], home: Path) -> None:
    for cluster in clusters:
        if cluster.paths.record.is_file():
            cluster.down()
    if home.is_dir() and not any(home.iterdir()):
        home.rmdir()
