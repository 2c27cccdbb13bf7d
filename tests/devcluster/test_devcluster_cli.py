"""``hpcrl devcluster`` as a person uses it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from devcluster_testing import wait_until
from typer.testing import CliRunner, Result

from hpcrl.cli.main import app
from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.errors import UsageError


@pytest.fixture
def hpcrl(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CliRunner]:
    monkeypatch.setenv("HPCRL_DEVCLUSTER_HOME", str(home))
    yield CliRunner()
    for name in ("cli",):
        cluster = DevCluster.named(name, home)
        if cluster.paths.record.is_file():
            cluster.down()


def call(runner: CliRunner, *arguments: str, stdin: str = "") -> Result:
    return runner.invoke(app, ["devcluster", *arguments, "--name", "cli"], input=stdin)


@pytest.mark.slurm
def test_a_session(hpcrl: CliRunner, home: Path) -> None:
    up = call(hpcrl, "up", "--nodes", "2", "--gpus", "4")
    assert up.exit_code == 0, up.output
    assert "2 nodes (cli-001 to cli-002) ready" in up.stdout

    exports = call(hpcrl, "env").stdout
    script = f"{exports}\nsrun --nodes=2 --gres=gpu:h200:4 bash -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    seen = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=300).stdout
    assert sorted(seen.splitlines()) == ["cli-001 0,1,2,3", "cli-002 0,1,2,3"]

    assert "killed, the node is DOWN" in call(hpcrl, "kill-node", "cli-002").stdout
    status = json.loads(call(hpcrl, "status", "--json").stdout)
    assert status["controller"] == "answers"
    assert [(n["name"], n["alive"]) for n in status["nodes"]] == [("cli-001", True), ("cli-002", False)]
    assert "dead" in call(hpcrl, "status").stdout
    assert call(hpcrl, "revive-node", "cli-002").stdout == "cli-002: usable\n"

    assert "frozen" in call(hpcrl, "pause-controller").stdout
    assert json.loads(call(hpcrl, "status", "--json").stdout)["controller"] == "paused"
    assert "answers" in call(hpcrl, "resume-controller").stdout

    listed = json.loads(hpcrl.invoke(app, ["devcluster", "ls", "--json"]).stdout)
    assert [(row["name"], row["nodes"]) for row in listed] == [("cli", 2)]

    (home / "cli/shared/results").mkdir()
    refused = call(hpcrl, "down", stdin="n\n")
    assert refused.exit_code == 1
    assert (home / "cli/shared/results").is_dir()
    assert call(hpcrl, "down", "--yes").exit_code == 0
    assert not (home / "cli").exists()


@pytest.mark.slurm
@pytest.mark.campaign
def test_a_node_failure_that_slurm_did_not_notice(hpcrl: CliRunner, home: Path) -> None:
    """The controller finds out by itself, after its time-out."""
    cluster = DevCluster.named("cli", home)
    from hpcrl.devcluster.settings import ClusterSettings

    cluster.up(ClusterSettings(name="cli", nodes=2, node_timeout_s=5))
    assert call(hpcrl, "kill-node", "cli-002", "--unnoticed").stdout == "cli-002: 1 processes killed\n"
    wait_until(
        "the controller has noticed",
        lambda: "DOWN" in next(n.states for n in cluster.client().nodes() if n.name == "cli-002"),
        deadline_s=90.0,
    )


@pytest.mark.slurm
def test_shell_is_set_up(hpcrl: CliRunner, home: Path, tmp_path: Path) -> None:
    assert call(hpcrl, "up", "--nodes", "1").exit_code == 0
    out = tmp_path / "out"
    shell = tmp_path / "shell"
    shell.write_text(f"#!/bin/sh\nsqueue --noheader --states=all > {out}; echo $SLURM_CONF >> {out}\n")
    shell.chmod(0o755)
    pid = os.fork()
    if pid == 0:  # the command becomes the shell
        os.environ["SHELL"] = str(shell)
        call(hpcrl, "shell")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert out.read_text() == f"{home}/cli/etc/slurm.conf\n"


def test_no_such_cluster(hpcrl: CliRunner) -> None:
    for command in ("status", "down", "env", "pause-controller"):
        result = call(hpcrl, command)
        assert isinstance(result.exception, UsageError)
        assert "devcluster up --name cli" in str(result.exception)
