"""``hpcrl env check --job``: the check in a job, on a node where environments of a run would be."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from plans import plan_for

from hpcrl.bringup import environment_job
from hpcrl.bringup.environment_job import NodeCheck
from hpcrl.cli.main import main
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.environment_sandboxes import needs_bubblewrap
from hpcrl.config.load import load_cluster
from hpcrl.config.plan import Plan, Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import DeadlineError
from hpcrl.jobplan.role_python import environment_role
from hpcrl.sites import role_job, small_job
from hpcrl.sites.role_job import role_alone
from hpcrl.sites.small_job import SmallJob, job_directory, run_small_job
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.launch_arguments import Allocation, launch_replica
from hpcrl.submit.prepare import prepare
from hpcrl.supervisor.launch.replica_launcher import LocalLauncher
from hpcrl.supervisor.launch.role_program import RoleProgram, run_role_program

MODULE = """\
import os

from hpcrl.rollouts.environments import Outcome, Prompt


class Guess:
    def __init__(self, wrong=False):
        self.wrong = wrong

    def prompt(self, split, index):
        return Prompt(split=split, index=index, messages=({"role": "user", "content": f"{split} {index}"},))

    async def rollout(self, prompt, policy):
        reply = await policy.reply(prompt.messages)
        return Outcome(reward=float(self.wrong or reply.text == os.environ["GUESSED"]))

    def demonstration(self, prompt, *, correct, rng):
        return (*prompt.messages, {"role": "assistant", "content": os.environ["GUESSED"]})
"""
LAST_WORDS = "bash: module: command not found"


class Nodes(FakeSlurm):
    """A Slurm whose jobs run at the second look at the queue, on this machine."""

    def __init__(self) -> None:
        super().__init__()
        self.script = ""
        self.runs = True
        self.breaks = False
        self.hangs = False
        self.interrupt = ""
        self.refuses_cancel = False

    @property
    def cancelled(self) -> list[str]:
        return [call[-1] for call in self.calls if call[0] == "scancel"]

    def scontrol(self, argv: list[str]) -> CommandResult:
        return CommandResult(0, "Slurmctld(primary) at login is UP\n", "")

    def scancel(self, argv: list[str]) -> CommandResult:
        return self.error("scancel: error: Access denied") if self.refuses_cancel else CommandResult(0, "", "")

    def sbatch(self, argv: list[str]) -> CommandResult:
        result = super().sbatch(argv)
        self.script = argv[-1]
        self.text = Path(argv[-1]).read_text()
        if self.interrupt == "sbatch":
            raise KeyboardInterrupt
        return result

    def squeue(self, argv: list[str]) -> CommandResult:
        result = super().squeue(argv)
        if any(word.startswith("--jobs") for word in argv):
            if self.interrupt == "squeue":
                raise KeyboardInterrupt
            self.advance()
        return result

    def advance(self) -> None:
        for row in self.queue.values():
            if row["State"] == "PENDING" and self.runs:
                row |= {"State": "RUNNING", "NodeList": "n1"}
            elif row["State"] == "PENDING":
                row["Reason"] = "Resources"
            elif row["State"] == "RUNNING" and not self.hangs:
                row["State"] = "COMPLETED" if self.batch(Path(self.script).parent) == 0 else "FAILED"

    def batch(self, directory: Path) -> int:
        with open(directory / "log", "a") as log, contextlib.redirect_stderr(log):
            if self.breaks:
                log.write(f"{LAST_WORDS}\n")
                return 127
            return run_role_program(directory, launcher=LocalLauncher())


Hpcrl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes()
    monkeypatch.setattr("hpcrl.cli.slurm.reachable_slurm", nodes.client)
    monkeypatch.setattr(small_job, "_POLL_S", 0.01)
    monkeypatch.setattr(role_job, "_FAILED_S", 0.0)
    return nodes


@pytest.fixture
def hpcrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Hpcrl:
    """Call the command in a directory with a recipe, a profile and a secret; return exit code and both streams."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/guess_tasks.py").write_text(MODULE)
    (tmp_path / "secret").write_text("mellon\n")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "recipe.yaml").write_text(
        "extends: quickstart\nname: mine\nenvironments:\n"
        '  - {name: guess, kind: custom, factory: "guess_tasks:Guess", args: {}}\n'
    )
    (tmp_path / "mine.yaml").write_text(
        f"extends: devcluster\nname: mine\nvllm_python: null\npaths: {{runs_root: {tmp_path}/runs}}\n"
        f"secrets: {{GUESSED: {tmp_path}/secret}}\nlaunch: {{inherit: [PYTHONPATH]}}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/modules{os.pathsep}{os.environ.get('PYTHONPATH', '')}".strip(":"))
    monkeypatch.delenv("HPCRL_RUNS_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*options: str, cluster: str = "mine.yaml") -> tuple[int, str, str]:
        words = ["hpcrl", "env", "check", "recipe.yaml", "-c", cluster, "--tasks", "1", "--job", *options]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return call


# -- the result -------------------------------------------------------------------------------------------------------


def test_a_node_checks_rewards_with_the_secrets_of_the_role(hpcrl: Hpcrl, nodes: Nodes, tmp_path: Path) -> None:
    code, out, err = hpcrl()
    assert (code, out) == (
        0,
        "guess: good\n  nothing: reward 0 in the mean of 1 rollouts\n  right: reward 1 in the mean of 2 rollouts\n",
    ), err
    assert "job 100 asks a node of gpu to try the environments\n" in err
    assert "job 100 runs on n1 after " in err
    options = {line.removeprefix("#SBATCH ") for line in nodes.text.splitlines() if line.startswith("#SBATCH")}
    # of the trainer's nodes, where the orchestrator runs: a part of one, without its GPUs
    assert {"--partition=gpu", "--nodes=1", "--cpus-per-task=8", "--time=35", "--no-requeue"} <= options
    assert not [option for option in options if "gpu:" in option or "exclusive" in option]
    assert nodes.cancelled == []
    assert list((tmp_path / "runs").iterdir()) == []
    code, out, err = hpcrl("--json")
    found = json.loads(out)
    assert (code, found["job"], found["nodes"], found["limits"]) == (0, 101, ["n1"], None)
    assert found["environments"]["guess"]["played"] == {"nothing": [0.0], "right": [1.0, 1.0]}


def test_exit_codes_are_those_of_this_machine(hpcrl: Hpcrl, nodes: Nodes) -> None:
    code, out, _ = hpcrl("--set", "environments.0.args={wrong: true}")
    assert (code, "task 0: an empty reply earns 1" in out) == (1, True)
    code, out, _ = hpcrl("--set", "environments.0.factory=guess_tasks:Guesses")
    assert (code, "'guess_tasks' has no callable 'Guesses'" in out) == (2, True)


def test_limits_are_those_of_the_node(hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        {"limit": "processes", "held": False, "how": "fork was refused after 200"},
        {"limit": "network", "held": True, "how": "reached nothing"},
    ]
    good = {"problems": [], "notes": [], "played": {"nothing": [0.0]}, "made": True}
    answer = {"environments": {"guess": good}, "limits": {"problem": "", "checks": checks}}
    monkeypatch.setattr(environment_job, "check_environments_in_job", lambda *_, **__: NodeCheck(["n1"], 7, answer))
    code, out, _ = hpcrl()
    assert code == 1
    assert out.endswith(
        "limits of a sandbox on n1:\n  processes  NOT HELD  fork was refused after 200\n"
        "  network    holds  reached nothing\n"
    )
    assert json.loads(hpcrl("--json")[1])["limits"] == {"problem": "", "held": False, "checks": checks}
    checks[0]["held"] = True
    assert hpcrl()[0] == 0


# -- jobs that do not get to the check --------------------------------------------------------------------------------


def test_a_profile_without_slurm_has_no_nodes(hpcrl: Hpcrl, nodes: Nodes) -> None:
    code, _, err = hpcrl(cluster="local")
    assert code == 2
    assert "the profile local is of a machine without Slurm" in err
    assert "hint: leave out --job" in err
    assert nodes.calls == []


def test_a_missing_secret_is_refused_before_the_queue(hpcrl: Hpcrl, nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "secret").unlink()
    code, _, err = hpcrl()
    assert (code, "secrets.GUESSED" in err, nodes.calls) == (2, True, [])


def test_a_job_that_waits_too_long_is_cancelled(hpcrl: Hpcrl, nodes: Nodes) -> None:
    nodes.runs = False
    code, _, err = hpcrl("--wait", "0.1")
    assert code == 2
    assert "job 100 was still in the queue after 0.1 s; last seen: PENDING (Resources); it was cancelled" in err
    assert "hint: `squeue --start`" in err
    assert nodes.cancelled == ["100"]


def test_a_job_that_cannot_be_cancelled_is_named(hpcrl: Hpcrl, nodes: Nodes) -> None:
    nodes.runs, nodes.refuses_cancel = False, True
    code, _, err = hpcrl("--wait", "0")
    assert code == 2
    assert "it could not be cancelled and continues (`scancel 100` ends it): " in err


def test_a_job_that_fails_before_the_check_is_quoted(hpcrl: Hpcrl, nodes: Nodes, tmp_path: Path) -> None:
    nodes.breaks = True
    code, _, err = hpcrl()
    assert code == 2
    assert f"job 100 ended (FAILED) and could not try the environments; the end of its log:\n    {LAST_WORDS}\n" in err
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_program_that_fails_or_takes_too_long_is_quoted(
    hpcrl: Hpcrl, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = hpcrl("--timeout", "0.01")
    assert (code, "it took longer than 0.01 s to try the environments, and was ended" in err) == (2, True), err
    monkeypatch.setattr(environment_job, "CHECK_MODULE", "hpcrl.no_such_module")
    code, _, err = hpcrl()
    assert code == 2
    assert "No module named hpcrl.no_such_module" in err
    assert "it failed to try the environments: it ended with exit code 1" in err


@pytest.mark.parametrize(
    ("wait_s", "run_s", "what"),
    [
        # the time in the queue does not count
        (60.0, 0.05, "has not ended within 0.05 s; last seen: RUNNING; it was cancelled\n    hint: its node may hang"),
        (2.0, None, "has not ended within 2 s; last seen: RUNNING; it was cancelled\n    hint: --wait"),
    ],
)
def test_a_job_that_hangs_is_cancelled(
    nodes: Nodes, wait_s: float, run_s: float | None, what: str, tmp_path: Path
) -> None:
    nodes.hangs = True
    cluster = load_cluster("devcluster").value
    assert isinstance(cluster, SlurmCluster)
    with job_directory(tmp_path) as directory:
        job = SmallJob(directory, "hpcrl.nothing", ["--nodes=1"], "a node", wait_s, run_s)
        with pytest.raises(DeadlineError, match=re.escape(what)):
            run_small_job(cluster, job, client=nodes.client())
    assert nodes.cancelled == ["100"]


@pytest.mark.parametrize("during", ["sbatch", "squeue"])
def test_an_interrupt_cancels_the_job(hpcrl: Hpcrl, nodes: Nodes, during: str, tmp_path: Path) -> None:
    nodes.interrupt = during
    code, _, err = hpcrl()
    assert code == 130
    assert nodes.cancelled == ["100"]
    assert "job 100: it was cancelled" in err
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_interrupt_while_the_job_is_announced_cancels_it(nodes: Nodes, tmp_path: Path) -> None:
    cluster, said = load_cluster("devcluster").value, list[str]()
    assert isinstance(cluster, SlurmCluster)

    def say(text: str) -> None:
        said.append(text)
        if "asks" in text:
            raise KeyboardInterrupt

    with job_directory(tmp_path) as directory:
        job = SmallJob(directory, "hpcrl.nothing", ["--nodes=1"], "a node", 60.0, None)
        with pytest.raises(KeyboardInterrupt):
            run_small_job(cluster, job, client=nodes.client(), say=say)
    assert said == ["job 100 asks a node", "job 100: it was cancelled"]
    assert nodes.cancelled == ["100"]


# -- the node ---------------------------------------------------------------------------------------------------------


def planned(*overrides: str, cluster: str = "h200-28") -> Plan:
    prepared = prepare("glm5_swe", cluster, overrides, environ={}, cwd=Path("/work"), programs=False)
    return prepared.outlined()


def test_workers_with_nodes_of_their_own_are_tried_there() -> None:
    plan, _ = plan_for("quickstart", "devcluster", "environment_workers={count: 2}")
    assert environment_role(plan) is Role.ENV
    alone = role_alone(plan, Role.ENV, memory_gib=1.0)
    (component,), (group,) = alone.layout.components, alone.groups
    assert component.roles == ("env",)
    assert (component.asked, component.gpus_per_node, component.exclusive, component.memory_gib) == (1, 0, False, 1.0)
    assert (group.replicas, group.component, group.share, group.per_node) == (1, 0, None, 0)
    # a job does not ask for more than a node has
    assert role_alone(plan, Role.ENV, memory_gib=64.0).layout.components[0].memory_gib == 1.9


def test_the_program_runs_in_the_container_of_the_role(tmp_path: Path) -> None:
    profile = tmp_path / "boxed.yaml"
    profile.write_text(
        "extends: h200-28\nname: boxed\npaths: {runs_root: /shared/runs}\nenv: {COLOUR: blue}\n"
        "container: {kind: apptainer, image: /images/rl.sif, python: /opt/python}\n"
    )
    plan = role_alone(planned(cluster=str(profile)), Role.ORCHESTRATOR, memory_gib=4.0)
    (group,) = plan.groups
    assert group.env["COLOUR"] == "blue"
    allocations = {(0, 0): Allocation(("n7",))}
    launch = launch_replica(plan, group, 0, command=["guard"], cwd=Path("/shared/runs/x"), allocations=allocations)
    assert launch.argv[:1] == ("srun",)
    assert "--nodelist=n7" in launch.argv
    assert launch.argv[-2:] == ("/images/rl.sif", "guard")
    assert "/shared/runs/x:/shared/runs/x" in launch.argv
    assert "--nv" not in launch.argv
    assert not [word for word in launch.argv if word.startswith("--gres=gpu")]


@pytest.mark.parametrize(
    ("environment", "sandboxed"),
    [
        ({"kind": "calculator"}, False),
        ({"kind": "swe", "tasks": "t"}, True),
        ({"kind": "swe", "tasks": "t", "sandbox_backend": "docker", "images": "i"}, False),
        ({"kind": "harness", "path": "t", "command": ["x"]}, False),
        ({"kind": "harness", "path": "t", "command": ["x"], "sandbox": True}, True),
        ({"kind": "dataset", "path": "t", "rewards": [{"kind": "code"}]}, True),
    ],
)
def test_limits_are_tried_where_an_environment_has_sandboxes(environment: dict[str, Any], sandboxed: bool) -> None:
    recipe = Recipe.model_validate(
        {"name": "r", "model": {"path": "m"}, "environments": [{"name": "one", **environment}], "trainer": {"steps": 1}}
    )
    assert needs_bubblewrap(recipe.environments[0]) is sandboxed


def test_requests_survive_the_disk(tmp_path: Path) -> None:
    asked = RoleProgram(cluster="{}", plan="{}", command=["a", "{é}"], timeout_s=1.5, doing="try")
    asked.write(tmp_path)
    assert RoleProgram.read(tmp_path) == asked
