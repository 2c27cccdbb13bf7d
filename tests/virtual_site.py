"""A virtual cluster for the tests of a session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.devcluster.cluster import DevCluster
from hpcrl.devcluster.packages import missing_programs
from hpcrl.devcluster.settings import ClusterSettings


def virtual_site(name: str, *, nodes: int) -> Iterator[DevCluster]:
    """What a fixture yields from: a cluster that is gone afterwards; tests are skipped where there is no Slurm."""
    if missing := missing_programs():
        pytest.skip(f"no Slurm on this machine: apt-get install {' '.join(dict.fromkeys(missing.values()))}")
    # sockets need short paths, and pytest's are long
    cluster = DevCluster.named(name, Path(f"/tmp/hpcrl-{name}-{time.time_ns() % 10**8}"))
    cluster.up(ClusterSettings(name=name, nodes=nodes, grace_s=30))
    yield cluster
    cluster.down()
    cluster.paths.root.parent.rmdir()
