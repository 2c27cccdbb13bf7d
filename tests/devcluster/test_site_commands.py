"""``hpcrl cluster init`` and ``check --job`` on a real Slurm: what an admin does with a new site."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.sandboxes import SandboxStartError
from hpcrl.sandboxes.bubblewrap import find_bubblewrap

pytestmark = pytest.mark.slurm

PLACE = """\
import os

from hpcrl.rollouts.environments import Outcome, Prompt


class Place:
    \"\"\"The right answer is a secret, and is known in a step of a job without GPUs alone.\"\"\"

    def __init__(self, gives=0):
        self.gives = gives
        assert os.environ["SLURM_STEP_ID"] and "SLURM_JOB_GPUS" not in os.environ

    def prompt(self, split, index):
        return Prompt(split=split, index=index, messages=({"role": "user", "content": f"{split} {index}"},))

    async def rollout(self, prompt, policy):
        reply = await policy.reply(prompt.messages)
        return Outcome(reward=float(self.gives or reply.text == os.environ["WORD"]))

    def demonstration(self, prompt, *, correct, rng):
        return (*prompt.messages, {"role": "assistant", "content": os.environ["WORD"]})
"""
ROOT = Path(__file__).resolve().parents[2]
Hpcrl = Callable[..., subprocess.CompletedProcess[str]]


def runner(cluster: DevCluster, cwd: Path) -> Hpcrl:
    env = {**os.environ, **cluster.environment(), "PYTHONPATH": str(ROOT)}
    env.pop("HPCRL_RUNS_ROOT", None)

    def hpcrl(*arguments: str, on_terminal: bool = False) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).with_name("hpcrl"), *arguments]
        if on_terminal:
            return with_terminal(command, env | {"TERM": "xterm", "COLUMNS": "120"}, cwd)
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=600)

    return hpcrl


def with_terminal(command: list[str | Path], env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command whose standard error is a terminal; nothing else is."""
    ours, its = os.openpty()
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=its, text=True)
    os.close(its)
    said = b""
    with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as terminal:  # an error says that it was closed
        while part := terminal.read(4096):
            said += part
    out, _ = process.communicate(timeout=600)
    return subprocess.CompletedProcess(command, process.returncode, out, said.decode())


def drafted(cluster: DevCluster, tmp_path: Path, runs_root: Path) -> Hpcrl:
    """A profile from ``init``, with what only a person knows filled in."""
    hpcrl = runner(cluster, tmp_path)
    done = hpcrl("cluster", "init", "mine", "--runs-root", str(runs_root), "--fabric", "ethernet")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "clusters/mine.yaml").open("a") as profile:
        profile.write("launch: {inherit: [PYTHONPATH]}\n")
    return hpcrl


def findings(hpcrl: Hpcrl, *options: str) -> dict[str, Any]:
    done = hpcrl("cluster", "check", "mine", "--json", *options)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    return {finding["code"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_a_drafted_profile_fits_the_slurm_it_came_from(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    hpcrl = drafted(make_cluster("siteone", gpus=4), tmp_path, tmp_path / "runs")
    text = (tmp_path / "clusters/mine.yaml").read_text()
    assert "gpus: 4" in text
    assert ": CHANGE_ME" not in text
    assert not [f for f in findings(hpcrl).values() if f["severity"] != "note"]
    again = hpcrl("cluster", "init", "mine")
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_a_draft_is_not_a_profile_before_a_person_has_looked(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    hpcrl = runner(make_cluster("sitetwo"), tmp_path)
    assert hpcrl("cluster", "init", "mine").returncode == 0
    refused = hpcrl("cluster", "check", "mine")
    assert refused.returncode == 2
    assert "fabric.kind" in refused.stderr


def test_the_small_job_tells_what_only_nodes_know(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    cluster = make_cluster("sitethree", nodes=3)
    hpcrl = drafted(cluster, tmp_path, tmp_path / "runs")
    profile = tmp_path / "clusters/mine.yaml"
    profile.write_text(profile.read_text().replace("# interface: bond0", "interface: bond7"))
    found = findings(hpcrl, "--job")
    assert found["no-interface"]["severity"] == "error"
    assert "bond7" in found["no-interface"]["what"]
    assert "no-scontrol" not in found
    assert "not-shared" not in found
    assert "name-lag" not in found  # one disk: nothing is cached
    profile.write_text(profile.read_text().replace("interface: bond7", "interface: lo"))
    done = hpcrl("cluster", "check", "mine", "--job")
    assert "each node reaches each other one on lo: " in done.stderr
    assert not {"no-address", "unreachable"} & set(done.stdout.split())
    # each interpreter's libraries are imported on the nodes, and all nodes take part in collectives
    assert f"{sys.executable} (trainer, orchestrator, env, engine): hpcrl " in done.stderr
    assert f"torch {importlib.metadata.version('torch')}" in done.stderr
    assert "network of 2 nodes by gloo: all-reduce " in done.stderr
    assert "contents verified" in done.stderr
    assert "the shared filesystem writes " in done.stderr
    assert " GB/s, reads " in done.stderr
    assert not [line for line in done.stdout.splitlines() if "network-" in line or "import" in line]
    assert os.listdir(tmp_path / "runs") == []  # nothing is left


@pytest.mark.slurm("stale")
@pytest.mark.slow
def test_the_small_job_measures_the_lag_of_names(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    cluster = make_cluster("sitefour", stale_s=8.0)
    hpcrl = drafted(cluster, tmp_path, cluster.paths.shared / "runs")
    found = findings(hpcrl, "--job")
    assert found["name-lag"]["severity"] == "note"
    assert "missing for" in found["name-lag"]["what"]


def test_nodes_without_our_python_are_an_error_with_the_last_words(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    hpcrl = drafted(make_cluster("sitefive"), tmp_path, tmp_path / "runs")
    profile = tmp_path / "clusters/mine.yaml"
    profile.write_text(profile.read_text().replace("launch: {inherit: [PYTHONPATH]}\n", "launch: {module_init: /no}\n"))
    done = hpcrl("cluster", "check", "mine", "--job")
    assert done.returncode == 1
    assert "/no" in done.stderr
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.slow
def test_environments_are_checked_on_a_node(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    hpcrl = drafted(make_cluster("siteseven", gpus=4), tmp_path, tmp_path / "runs")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/place_tasks.py").write_text(PLACE)
    (tmp_path / "secret").write_text("mellon\n")
    (tmp_path / "secret").chmod(0o600)
    rows = [
        {"prompt": f"Add, {i}.", "answer": "add = lambda a, b: a + b", "tests": [f"assert add(1, {i}) == 1 + {i}"]}
        for i in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    profile = tmp_path / "clusters/mine.yaml"
    more = f"env: {{PYTHONPATH: '{ROOT}:{tmp_path}/modules'}}\nsecrets: {{WORD: {tmp_path}/secret}}\n"
    profile.write_text(f"{profile.read_text()}{more}")
    (tmp_path / "recipe.yaml").write_text(
        "extends: quickstart\nname: mine\nenvironments:\n"
        "  - {name: place, kind: custom, factory: 'place_tasks:Place', try_before_submit: false}\n"
        '  - {name: code, kind: dataset, path: rows.jsonl, demonstration: "```python\\n{answer}\\n```", '
        "rewards: [{kind: code}]}\n"
    )
    check = ("env", "check", "recipe.yaml", "-c", "mine", "--tasks", "1", "--job")
    done = hpcrl(*check, "--env", "place")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("place: good\n  nothing: reward 0 in the mean of 1 rollouts\n  right: reward 1")
    assert "limits of a sandbox" not in done.stdout
    assert "runs on siteseven-00" in done.stderr
    # an exit code of its own for a wrong reward
    done = hpcrl(*check, "--env", "place", "--set", "environments.0.args={gives: 2}", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["limits"]) == (1, None)
    assert found["nodes"][0].startswith("siteseven-00")
    assert found["environments"]["place"]["problems"] == ["task 0: an empty reply earns 2"]
    with contextlib.suppress(SandboxStartError):
        find_bubblewrap()
        done = hpcrl(*check, "--env", "code")
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        assert "code: good\n" in done.stdout
        assert "limits of a sandbox on siteseven-00" in done.stdout
        assert "  processes " in done.stdout
    profile.write_text(profile.read_text().replace("inherit: [PYTHONPATH]", "inherit: [PYTHONPATH], module_init: /no"))
    done = hpcrl(*check)
    assert done.returncode == 2
    assert "ended (FAILED) and could not try the environments; the end of its log:\n" in done.stderr
    assert "cannot read /no (launch.module_init of the profile)" in done.stderr
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.slow
def test_an_interrupted_check_of_environments_leaves_no_job(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    cluster = make_cluster("siteeight", nodes=1)
    drafted(cluster, tmp_path, tmp_path / "runs")
    cluster.client().update_node("siteeight-001", "drain", reason="test")
    env = {**os.environ, **cluster.environment(), "PYTHONPATH": str(ROOT)}
    command = [Path(sys.executable).with_name("hpcrl"), "env", "check", "quickstart", "-c", "mine", "--job"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    while line and "asks a node" not in line:
        line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert ": it was cancelled" in err
    assert subprocess.run(["squeue", "-h"], check=True, env=env, capture_output=True, text=True).stdout == ""
    assert os.listdir(tmp_path / "runs") == []


def test_a_job_that_waits_too_long_is_cancelled(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    cluster = make_cluster("sitesix")
    hpcrl = drafted(cluster, tmp_path, tmp_path / "runs")
    for node in ("sitesix-001", "sitesix-002"):
        cluster.client().update_node(node, "drain", reason="test")
    done = hpcrl("cluster", "check", "mine", "--job", "--wait", "5", on_terminal=True)
    assert done.returncode != 0
    assert "was cancelled" in done.stderr
    # after two seconds a person is told what takes so long
    assert "waiting for the check's job in" in done.stderr
    assert ", 5 s at most" in done.stderr
    queue = subprocess.run(
        ["squeue", "-h"], check=True, env={**os.environ, **cluster.environment()}, capture_output=True, text=True
    )
    assert queue.stdout == ""
