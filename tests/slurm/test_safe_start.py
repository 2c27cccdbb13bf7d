"""No Python of ours imports from the directory that somebody is in: not the batch process, not a role, not a guard."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from plans import CWD, plan_for
from test_render import render

import hpcrl
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Plan
from hpcrl.jobplan import absolute_paths, make_plan
from hpcrl.processes.interpreter import with_safe_path
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.scripts import in_job_script, run_scripts
from hpcrl.submit import local_executor as executor
from hpcrl.submit.local_executor import DetachedLocalExecutor
from hpcrl.supervisor.launch.commands import role_environment
from hpcrl.supervisor.process.guarded import guard_command

PYTHON = "{python}"
#: recipes and settings that between them have every role and every program that stands before one
PLANS = {
    "quickstart": (),
    "quickstart_vllm": (),
    "qwen3_30b_a3b": ("engine.memory.kv_offload_gib=400", "engine.memory.kv_offload_disk_gib=2000"),
    "qwen3_30b_a3b_lowmem": (),
    "glm5_swe": (),
}
VARIANTS = [
    *((recipe, settings) for recipe, settings in PLANS.items()),
    ("quickstart_vllm", ("engine.router.kind=dynamo",)),
    ("glm5_swe", ("job.payload=probe",)),
    ("glm5_swe", ("engine.kv_store={segment_gib: 100}",)),
]


def unsafe(words: Sequence[str], python: str = PYTHON) -> list[str]:
    """Interpreters in a command line that would import from the working directory, each with what follows."""
    found = []
    for i, word in enumerate(words):
        if word == python:
            options = []
            for option in words[i + 1 :]:
                options.append(option)
                if option in ("-m", "-c") or not option.startswith("-"):
                    break
            if not {"-P", "-I"} & set(options):
                found.append(shlex.join(words[i : i + 4]))
    return found


def plans() -> Iterator[Plan]:
    for recipe, settings in VARIANTS:
        for site in ("local", "devcluster", "h200-28"):
            loaded, profile = load_recipe(recipe, settings).value, load_cluster(site).value
            yield make_plan(absolute_paths(loaded, CWD), profile, "r", Path("/runs/r"))


def test_commands_of_every_plan() -> None:
    modules = set()
    for plan in plans():
        for group in plan.groups:
            assert group.command[0] == PYTHON
            assert not unsafe(group.command), (plan.recipe, plan.cluster, group.role)
            modules |= {group.command[i + 1] for i, word in enumerate(group.command) if word == "-m"}
    # the walk has seen them all
    assert modules >= {
        "hpcrl.inference.dynamo.router",
        "hpcrl.inference.embedded.server",
        "hpcrl.inference.vllm.disk_tier",
        "hpcrl.inference.vllm.front",
        "hpcrl.inference.vllm.side",
        "hpcrl.rollouts",
        "hpcrl.runs.probe",
        "hpcrl.store.join",
        "hpcrl.store.master",
        "hpcrl.trainer",
        "hpcrl.trainer.launcher",
        "vllm.entrypoints.cli.main",
        "vllm.entrypoints.openai.api_server",
        "hpcrl.inference.vllm.router",
    }


@pytest.mark.parametrize("layout", ["hetjob", "single", "elastic"])
def test_every_script_and_every_launcher(layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan, site = plan_for("quickstart", "devcluster", f"job.layout={layout}")
    texts = [script.text for script in run_scripts(plan, site, run_id="7" * 32)]
    if layout != "elastic":  # its replicas are jobs: it does not go into an allocation that is there
        texts.append(in_job_script(plan, site, run_id="7" * 32, run_dir=plan.run_dir))
    for text in texts:
        assert "\nexport PYTHONSAFEPATH=1\n" in text
        command = shlex.split(text.splitlines()[-1])
        assert sys.executable in command
        assert not unsafe(command, sys.executable)
    assert not unsafe(guard_command(PYTHON))
    started: list[list[str]] = []

    class Started:
        pid = os.getpid()

        def __init__(self, command: list[str], *, env: dict[str, str], **_: object) -> None:
            assert env["PYTHONSAFEPATH"] == "1"
            started.extend([command, shlex.split(env["SUBMITIT_LOCAL_COMMAND"])])

        def poll(self) -> None: ...

    monkeypatch.setattr(executor.subprocess, "Popen", Started)
    DetachedLocalExecutor(tmp_path, time_limit_s=1, environment={}).submit(time.time)
    assert len(started) == 2
    assert not [word for command in started for word in unsafe(command, sys.executable)]


def test_environment_of_roles() -> None:
    for plan in plans():
        for group in plan.groups:
            own = group.model_copy(update={"env": {**group.env, "PYTHONSAFEPATH": "", "PYTHONPATH": ":/mine:"}})
            env = role_environment(own, 0, run=RunDir(plan.run_dir), run_id="7", attempt=1, inherited={})
            assert (env["PYTHONSAFEPATH"], env["PYTHONPATH"]) == ("1", "/mine")
    assert "PYTHONPATH" not in with_safe_path({"PYTHONPATH": ":"})


def test_nothing_in_the_package_writes_such_a_command_by_hand() -> None:
    """Lists like ``[sys.executable, "-m", …]``: `hpcrl.processes.interpreter.module_command` is the one place for
    them."""
    wrong = []
    for path in sorted(Path(hpcrl.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.List | ast.Tuple):
                continue
            for python, option in zip(node.elts, node.elts[1:], strict=False):
                starts = ast.unparse(python) in ("python", "sys.executable", "self.python", repr(PYTHON))
                if starts and isinstance(option, ast.Constant) and option.value not in ("-P", "-I"):
                    wrong.append(f"{path}:{node.lineno}")
    assert not wrong


def test_batch_environment_drops_the_working_directory_from_the_path(tmp_path: Path) -> None:
    plan, site = plan_for("quickstart", "devcluster")
    site = site.model_copy(update={"launch": site.launch.model_copy(update={"inherit": ("PYTHONPATH",)})})
    script = tmp_path / "job.sbatch"
    script.write_text(render(plan, site, command=lambda part: ["printenv", "PYTHONPATH"])[0].text)
    for given, left in ((":/a::/b c:", "/a:/b c"), ("::", ""), ("/a", "/a")):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": given}
        out = subprocess.run(["bash", script], env=env, check=True, capture_output=True, text=True).stdout
        assert out == f"{left}\n", given


def test_modules_in_the_folder_of_the_recipe_shadow_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real controller and a real batch process of a local run, started where such files lie."""
    for name in ("submitit/__init__.py", "hpcrl/__init__.py", "json.py", "logging.py"):
        path = tmp_path / "here" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'taken')!r}, 'a').write({name!r})\nraise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", "") + ":")
    job = DetachedLocalExecutor(tmp_path / "submitit", time_limit_s=60, environment={}).submit(os.getcwd)
    assert job.result() == str(tmp_path / "here")
    # the guard, as `start_guarded` starts it
    env = with_safe_path(os.environ)
    guard = subprocess.run(guard_command(sys.executable), env=env, input=b"", check=False, capture_output=True)
    assert (guard.returncode, guard.stderr) == (0, b"")  # nobody told it anything
    assert not (tmp_path / "taken").exists(), (tmp_path / "taken").read_text()
