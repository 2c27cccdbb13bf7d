"""A virtual cluster for the tests of a session."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import wait_for

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.devcluster.packages import missing_programs
from hpcrl.devcluster.settings import ClusterSettings


def virtual_site(name: str, *, nodes: int, node_timeout_s: int = 30) -> Iterator[DevCluster]:
    """What a fixture yields from: a cluster that is gone afterwards; tests are skipped where there is no Slurm."""
    if missing := missing_programs():
        pytest.skip(f"no Slurm on this machine: apt-get install {' '.join(dict.fromkeys(missing.values()))}")
    # sockets need short paths, and pytest's are long
    cluster = DevCluster.named(name, Path(f"/tmp/hpcrl-{name}-{time.time_ns() % 10**8}"))
    cluster.up(ClusterSettings(name=name, nodes=nodes, grace_s=30, node_timeout_s=node_timeout_s))
    yield cluster
    cluster.down()
    cluster.paths.root.parent.rmdir()


def wait_written(cluster: DevCluster) -> Callable[[], None]:
    """The controller has written down what it knows now: killed before, it would take started jobs for pending.

    It writes seconds after a change of any job, and else every five minutes: so there is a change. What is returned
    undoes it, when the controller is back: undone before, a job whose end was not written yet would come back.
    """
    saved, now, env = cluster.paths.state / "job_state", time.time(), {**os.environ, **cluster.environment()}
    held = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]
    job = subprocess.run(held, env=env, check=True, capture_output=True, text=True).stdout.strip()
    wait_for(lambda: saved.exists() and saved.stat().st_mtime > now, 60.0, "state written by the controller")

    def undo() -> None:
        # it need not be known: what was written may have been on its way before
        subprocess.run(["scancel", job], env=env, check=False, capture_output=True)

    return undo
