"""A virtual cluster for the tests of a session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import wait_for

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


def wait_written(cluster: DevCluster) -> None:
    """The controller has written down what it knows now: killed before, it would take started jobs for pending."""
    saved, now = cluster.paths.state / "job_state", time.time()
    wait_for(lambda: saved.exists() and saved.stat().st_mtime > now, 60.0, "state written by the controller")
