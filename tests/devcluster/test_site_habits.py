"""What sites do to steps and nodes, on a real Slurm: a TaskProlog that prints, and nodes that are switched off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from devcluster_testing import wait_until
from test_site_commands import ROOT, drafted, findings, runner

from hpcrl.devcluster.dev_cluster import DevCluster

pytestmark = pytest.mark.slurm


def configured(cluster: DevCluster, *lines: str) -> None:
    """Add lines to the cluster's slurm.conf, and let its daemons read them."""
    with cluster.paths.conf.open("a") as stream:
        stream.write("".join(f"{line}\n" for line in lines))
    slurm(cluster, "scontrol", "reconfigure")


def slurm(cluster: DevCluster, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **cluster.environment()}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_a_task_prolog_that_prints_stops_nothing(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    cluster = make_cluster("siteseven")
    hpcrl = drafted(cluster, tmp_path, tmp_path / "runs")
    prolog = program(tmp_path / "prolog.sh", 'echo "print Welcome to $SLURMD_NODENAME"; echo \'print {"a": 1}\'')
    configured(cluster, f"TaskProlog={prolog}")
    found = findings(hpcrl, "--job")
    assert "step-silent" not in found
    assert "Welcome to siteseven-00" in found["step-noise"]["what"]
    submitted = hpcrl("submit", "quickstart", "--cluster", "mine", "--set", "job.payload=probe", "--name", "noisy")
    assert submitted.returncode == 0, submitted.stderr
    wait_until("the run has ended", lambda: "COMPLETED" in hpcrl("status", "noisy").stdout, deadline_s=120.0)


@pytest.mark.slow
def test_nodes_that_are_switched_off_count_as_slurm_counts_them(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    cluster = make_cluster("siteeight")
    true = program(tmp_path / "true.sh", "exit 0")
    configured(cluster, f"SuspendProgram={true}", f"ResumeProgram={true}", "SuspendTime=36000", "ResumeTimeout=30")
    hpcrl = drafted(cluster, tmp_path, tmp_path / "runs")
    client = cluster.client()
    names = [node.name for node in client.nodes()]
    for name in names:
        assert slurm(cluster, "scontrol", "update", f"nodename={name}", "state=power_down").returncode == 0
    wait_until("they are off", lambda: all("POWERED_DOWN" in node.states for node in client.nodes()), deadline_s=120.0)
    start = slurm(cluster, "sbatch", "--test-only", f"--nodes={len(names)}", "--wrap=true")
    assert "to start at" in start.stderr
    assert all(node.usable for node in client.nodes())
    assert "nodes-down" not in findings(hpcrl)


@pytest.mark.slow
def test_labels_and_a_prolog_of_the_shell_do_not_reach_the_steps_of_a_run(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    """In an allocation whose shell has srun's own variables set, as for a program that was started by hand."""
    cluster = make_cluster("sitenine", nodes=4)
    drafted(cluster, tmp_path, tmp_path / "runs")
    prolog = program(tmp_path / "prolog.sh", 'echo "print from the prolog of the shell"')
    variables = ["SLURM_LABELIO=1", f"SLURM_TASK_PROLOG={prolog}", "SLURM_CONSTRAINT=none-has-this"]
    hpcrl = [str(Path(sys.executable).with_name("hpcrl")), "submit", "quickstart", "--cluster", "mine", "--in-job"]
    settings = ["--set", "job.payload=probe", "--set", "job.layout=single", "--name", "inside", "--follow"]
    command = ["salloc", "--partition=gpu", "--nodes=4", "--exclusive", "env", *variables, *hpcrl, *settings]
    env = {**os.environ, **cluster.environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "COMPLETED" in runner(cluster, tmp_path)("status", "inside").stdout
