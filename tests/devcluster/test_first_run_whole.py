"""`hpcrl site first-run` on a real Slurm: all of it, and its interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import patience, wait_for
from vllm_environment import VLLM_PYTHON

from hpcrl.devcluster.dev_cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
DRAFT = ("--fabric", "ethernet", "--python", sys.executable)


class FirstRun:
    """The command in a directory of its own, on a virtual cluster."""

    def __init__(self, cluster: DevCluster, place: Path) -> None:
        self.place, self.runs_root = place, place / "runs"
        self.env = {**os.environ, **cluster.environment(), "PYTHONPATH": str(ROOT)}
        self.env.pop("HPCRL_RUNS_ROOT", None)
        self.client = cluster.client()

    def command(self, *options: str) -> list[str]:
        head = [str(Path(sys.executable).with_name("hpcrl")), "site", "first-run", "mine"]
        return [*head, "--runs-root", str(self.runs_root), *DRAFT, "--wait", "240", *options]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*options),
            cwd=self.place,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=300 * patience(),
        )

    def inherit(self) -> None:
        """Jobs start clean: what this checkout is imported by is named in the profile."""
        with (self.place / "clusters/mine.yaml").open("a") as profile:
            profile.write("launch: {inherit: [PYTHONPATH]}\n")

    def report(self) -> Any:
        return json.loads((self.place / "first-run-mine/report.json").read_text())

    def statuses(self) -> dict[str, str]:
        return {row["name"]: row["status"] for row in self.report()["stages"]}

    def state(self, run: Path) -> str:
        """State of a run, where Slurm is asked: a job that was still waiting has written nothing."""
        command = [self.command()[0], "status", str(run), "--json"]
        said = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False).stdout
        return str(json.loads(said)["state"])

    def jobs(self) -> str:
        return subprocess.run(["squeue", "-h"], check=True, env=self.env, capture_output=True, text=True).stdout


@pytest.fixture
def first(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> FirstRun:
    # what Slurm believes: the planner compares the memory of roles with it
    return FirstRun(make_cluster("first", nodes=3, memory_mib=16000), tmp_path)


def drafted(first: FirstRun, *more: str) -> None:
    """A draft as the first stage makes it, with what this checkout needs."""
    head = [
        str(Path(sys.executable).with_name("hpcrl")),
        "cluster",
        "init",
        "mine",
        "--runs-root",
        str(first.runs_root),
    ]
    subprocess.run([*head, *DRAFT, *more], cwd=first.place, env=first.env, check=True, capture_output=True)
    first.inherit()


def test_it_runs_whole_stops_where_a_person_must_act_and_is_interrupted(first: FirstRun) -> None:
    # without the kind of fabric there is something to fill in
    command = [word for word in first.command() if word not in ("--fabric", "ethernet")]
    stopped = subprocess.run(command, cwd=first.place, env=first.env, capture_output=True, text=True, check=False)
    assert stopped.returncode == 1, stopped.stderr
    assert "partitions.gpu.node.fabric.kind: is still to be filled in" in stopped.stderr
    assert "continue: hpcrl site first-run mine" in stopped.stderr
    assert first.statuses()["init"] == "stopped"
    profile = first.place / "clusters/mine.yaml"
    profile.write_text(profile.read_text().replace("kind: CHANGE_ME", "kind: ethernet"))
    first.inherit()

    process = subprocess.Popen(first.command(), cwd=first.place, env=first.env, stderr=subprocess.PIPE, text=True)
    try:
        run = wait_for(lambda: next(iter(first.runs_root.glob("first-run-probe-*")), None), 120.0, "the probe's run")
        wait_for(first.jobs, 30.0, "its job")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=90 * patience())
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, said
    assert "ending first-run-probe-" in said
    assert "interrupted in probe; passed stages are kept" in said
    passed = ["ok", "ok", "warning", "warning"]
    assert list(first.statuses().values()) == [*passed, "interrupted", "not begun"]
    assert first.state(run) in ("CANCELLED", "COMPLETED")
    wait_for(lambda: not first.jobs(), 60.0, "an empty queue")

    whole = first.run("--json")
    assert whole.returncode == 0, whole.stderr
    assert "3/6 check-job: passed on" in whole.stderr
    report = json.loads(whole.stdout)
    assert report == first.report()
    assert report["result"] == "passed"
    rows = {row["name"]: row for row in report["stages"]}
    assert rows["plan"]["facts"]["layout"] == "hetjob"
    places = rows["probe"]["facts"]["places"]
    assert set(places) == {"trainer 0/0", "engine 0/0", "orchestrator 0/0"}
    assert places["trainer 0/0"] != places["engine 0/0"]
    assert [step["step"] for step in rows["run"]["facts"]["steps"]] == [1, 2]
    assert rows["run"]["facts"]["versions"] == [0, 1, 2]
    assert rows["run"]["facts"]["rollouts"]["trained"] == 32
    text = (first.place / "first-run-mine/report.md").read_text()
    assert "# First run on mine: passed" in text
    assert "hpcrl submit quickstart -c mine --follow" in text


@pytest.mark.vllm
def test_engines_are_real_where_the_profile_names_vllm(first: FirstRun) -> None:
    drafted(first, "--vllm-python", str(VLLM_PYTHON))
    whole = first.run()
    assert whole.returncode == 0, whole.stderr
    rows = {row["name"]: row for row in first.report()["stages"]}
    assert rows["run"]["facts"]["backend"] == "vllm"
    assert rows["run"]["facts"]["rollouts"]["trained"] == 32
    assert set(rows["plan"]["facts"]["roles"]) == {"trainer", "engine", "router", "store", "orchestrator"}
