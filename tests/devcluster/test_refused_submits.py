"""Submits that Slurm refuses, or could never start: the reason comes at once, and nothing is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import wait_for

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.slurm.client import SlurmClient

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("job.payload=probe", "job.time_limit_h=0.5", "trainer.nodes=2", "trainer.ranks=2")


class Site:
    """A user of a cluster of four nodes, with a profile that may be wrong."""

    def __init__(self, cluster: DevCluster, directory: Path) -> None:
        self.directory, self.profile = directory, directory / "devcluster.yaml"
        self.runs = cluster.paths.root / "shared/runs"
        self.env = {**os.environ, **cluster.environment(), "PYTHONPATH": str(ROOT)}
        self.env.pop("HPCRL_RUNS_ROOT", None)
        self.describe(partition="gpu")

    def describe(self, partition: str) -> None:
        """Write the profile, with this name for the partition."""
        text = (ROOT / "clusters/devcluster.yaml").read_text().replace("runs_root: runs", f"runs_root: {self.runs}")
        text = text.replace("default: gpu", f"default: {partition}").replace("  gpu:\n", f"  {partition}:\n")
        self.profile.write_text(text + "launch: {inherit: [PYTHONPATH]}\n")

    def hpcrl(self, *arguments: str, code: int = 0) -> str:
        command = [Path(sys.executable).with_name("hpcrl"), *arguments]
        done = subprocess.run(
            command, cwd=self.directory, env=self.env, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, engines: int, *options: str, code: int = 0) -> str:
        settings = (*SIZES, f"model.path={self.directory}", f"engine.replicas={engines}")
        sets = [part for setting in settings for part in ("--set", setting)]
        return self.hpcrl("submit", "quickstart", "-c", str(self.profile), "-n", "o1", *sets, *options, code=code)

    def nothing_is_left(self) -> bool:
        rows = json.loads(self.hpcrl("ls", "--json"))["runs"]
        return not rows and not (self.runs.is_dir() and list(self.runs.iterdir()))


@pytest.fixture
def site(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> tuple[Site, SlurmClient]:
    cluster = make_cluster("refusing", nodes=4)
    return Site(cluster, tmp_path), cluster.client()


def test_what_slurm_refuses_or_never_starts(site: tuple[Site, SlurmClient]) -> None:
    user, slurm = site
    # more nodes than there are
    said = user.submit(4, code=2)
    assert "the run needs 6 nodes of partition gpu at once, which has 4\n" in said
    assert "--queue-anyway" in said
    assert user.nothing_is_left()

    # a partition that is not there: Slurm says so before, and where it is not asked, at the submit
    user.describe(partition="grey")
    said = user.submit(1, code=2)
    assert "Slurm refuses job main" in said
    assert "nvalid partition" in said
    assert user.nothing_is_left()
    assert "nvalid partition" in user.submit(1, "--queue-anyway", code=2)
    assert user.nothing_is_left()
    assert slurm.find(name="o1", token="") == []

    # limits of the partition, beyond which jobs of this site only wait
    user.describe(partition="gpu")
    slurm._run(["scontrol", "update", "PartitionName=gpu", "MaxTime=10", "MaxNodes=2"])
    said = user.submit(1, code=2)
    assert "the run asks for 0.5 h" in said
    assert "gives 0.166667 h (MaxTime)" in said
    assert "a job of the run needs" in said or "MaxNodes" not in said  # two components of two and one nodes
    slurm._run(["scontrol", "update", "PartitionName=gpu", "MaxTime=UNLIMITED", "MaxNodes=UNLIMITED"])

    # nodes that cannot be used now
    names = sorted(node.name for node in slurm.nodes())
    slurm.update_node(names[0], "DRAIN", reason="new cables")
    said = user.submit(2, code=2)
    assert f"which has 4, 3 of them usable ({names[0]} DRAIN" in said
    assert ": new cables)" in said
    assert user.nothing_is_left()

    # who knows better waits, and is told for what; the same name, the corrected profile
    user.submit(2, "--queue-anyway")
    shown = wait_for(lambda: text if "reason" in (text := user.hpcrl("status", "o1")) else None, 60.0, "a reason")
    assert "PENDING: needs 4 nodes, 3 usable; reason " in " ".join(shown.split())
    assert "left" not in shown
    slurm.update_node(names[0], "RESUME")
    wait_for(lambda: json.loads(user.hpcrl("status", "o1", "--json"))["state"] == "COMPLETED" or None, 120.0, "the end")
