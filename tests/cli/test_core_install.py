"""Every command in the environment of a login node: it works, or names the extra that it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from core_install import core_distributions
from start_models import write_tiny_model

from hpcrl.cli.main import app
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer

HERE = Path(__file__).parent
RECIPE = """
extends: quickstart
name: mine
model: {path: model}
environments:
  - {name: reverse, kind: words, task: reverse}
  - {name: own, kind: custom, factory: "nowhere:Env"}
"""
TALKS = """
name: talks
model: {path: model}
sft: {data: talks.jsonl}
trainer: {steps: 2}
"""
NEW = ["--model", "tiny", "--task", "words", "-c", "local", "--size", "0", "--steps", "4", "--goal", "try"]
#: command lines by command; RUN is a run that has ended
LINES: dict[str, list[list[str]]] = {
    "submit": [["submit", "mine.yaml", "--dry-run"], ["submit", "mine.yaml"]],
    "sft": [["sft", "talks.yaml", "--dry-run"], ["sft", "talks.yaml"], ["sft", "mine.yaml"]],
    "sweep status": [["sweep", "status", "no-sweep"]],
    "sweep ls": [["sweep", "ls"], ["sweep", "ls", "--json"]],
    "sweep resume": [["sweep", "resume", "no-sweep"]],
    "sweep cancel": [["sweep", "cancel", "no-sweep", "--yes"]],
    "sweep wait": [["sweep", "wait", "no-sweep"]],
    "resume": [["resume", "RUN"]],
    "wait": [["wait", "RUN"], ["wait", "RUN", "--running", "--timeout", "1"]],
    "cancel": [["cancel", "RUN"]],
    "scale": [["scale", "RUN", "engine=2"]],
    "requeue": [["requeue", "RUN"]],
    "shell": [["shell", "RUN", "--role", "engine/0", "--", "true"]],
    "status": [["status", "RUN"], ["status", "RUN", "--json"]],
    "ls": [["ls"]],
    "logs": [["logs", "RUN"]],
    "why": [["why", "RUN"], ["why", "RUN", "--events"], ["why", "RUN", "--slow"]],
    "trace": [["trace", "RUN", "-o", "trace.json"]],
    "profile": [["profile", "RUN"], ["profile", "RUN", "--role", "engine", "--stacks"]],
    "compare": [["compare", "RUN", "OTHER"]],
    "board": [["board"], ["board", "--runs-root", "nowhere"]],
    "report": [["report", "RUN"], ["report", "RUN", "-o", "picture.png"], ["report", "RUN", "-o", "page.html"]],
    "notify test": [["notify", "test", "RUN"], ["notify", "test", "mine.yaml"]],
    "notify ls": [["notify", "ls", "RUN"]],
    "sinks send": [["sinks", "send", "RUN"]],
    "bundle": [["bundle", "RUN"]],
    "share": [["share", "RUN", "--dry-run"], ["share", "RUN", "--undo"]],
    "gc": [["gc", "--dry-run"]],
    "rm": [["rm", "RUN"]],
    "simulate": [["simulate", "qwen3_30b_a3b", "-c", "h200-28", "--days", "0.02"]],
    "render": [["render", "glm5_swe", "-c", "h200-28", "-o", "scripts"]],
    "warmup": [["warmup", "mine.yaml", "--output", "made"]],
    "model get": [["model", "get", "owner/model", "-o", "got"]],
    "model ls": [["model", "ls"], ["model", "ls", "--json"]],
    "model dequantise": [["model", "dequantise", "model", "-o", "copied"]],
    "model extract": [["model", "extract", "model", "-o", "extracted"]],
    "model check": [["model", "check", "model"], ["model", "check", "owner/model"]],
    "weights ls": [["weights", "ls", "RUN"]],
    "weights show": [["weights", "show", "RUN", "0"]],
    "weights verify": [["weights", "verify", "RUN"]],
    "weights diff": [["weights", "diff", "RUN", "0", "1"]],
    "weights pin": [["weights", "pin", "RUN", "0", "-m", "why"]],
    "weights unpin": [["weights", "unpin", "RUN", "0"]],
    "weights prune": [["weights", "prune", "RUN"]],
    "checkpoint ls": [["checkpoint", "ls", "RUN"]],
    "checkpoint show": [["checkpoint", "show", "RUN", "1"]],
    "checkpoint verify": [["checkpoint", "verify", "RUN"]],
    "checkpoint pin": [["checkpoint", "pin", "RUN", "1", "-m", "why"]],
    "checkpoint unpin": [["checkpoint", "unpin", "RUN", "1"]],
    "checkpoint prune": [["checkpoint", "prune", "RUN"]],
    "checkpoint export": [["checkpoint", "export", "RUN", "-o", "exported"]],
    "rollouts ls": [["rollouts", "ls", "RUN"]],
    "rollouts show": [["rollouts", "show", "RUN", "1/0"]],
    "rollouts verify": [["rollouts", "verify", "RUN"], ["rollouts", "verify", "RUN", "--ledger-only"]],
    "rollouts export": [
        ["rollouts", "export", "RUN", "-o", "a.jsonl"],
        ["rollouts", "export", "RUN", "-o", "a.parquet"],
    ],
    "rollouts rescore": [
        ["rollouts", "rescore", "RUN"],
        ["rollouts", "rescore", "RUN", "--reward", "numeric", "--audit", "--json"],
    ],
    "store status": [["store", "status", "RUN"]],
    "store canary": [["store", "canary", "RUN"]],
    "plan show": [["plan", "mine.yaml"], ["plan", "glm5_swe", "-c", "h200-28"], ["plan", "mine.yaml", "--real-model"]],
    "plan search": [["plan", "search", "qwen3_30b_a3b", "-c", "h200-28", "--nodes", "2..3"]],
    "plan diff": [["plan", "diff", "mine.yaml", "--set", "seed=2"]],
    "plan calibrate": [["plan", "calibrate", "RUN"]],
    "plan profile": [["plan", "profile", "-o", "kernels.yaml", "--device", "cpu", "--minutes", "0.05"]],
    "recipe ls": [["recipe", "ls"]],
    "recipe check": [["recipe", "check", "mine.yaml"], ["recipe", "check", "quickstart"]],
    "recipe show": [["recipe", "show", "mine.yaml"]],
    "recipe schema": [["recipe", "schema"]],
    "recipe new": [["recipe", "new", "no.yaml"], ["recipe", "new", "n.yaml", *NEW]],
    "recipe migrate": [["recipe", "migrate", "mine.yaml"]],
    "recipe import": [["recipe", "import", "foreign.toml"], ["recipe", "import", "mine.yaml"]],
    "cluster ls": [["cluster", "ls"]],
    "cluster migrate": [["cluster", "migrate", "new.yaml"]],
    "cluster show": [["cluster", "show", "local"]],
    "cluster init": [["cluster", "init", "new"]],
    "cluster check": [["cluster", "check", "local"]],
    "site install": [
        ["site", "install", "--role", "env", "--prefix", "environments", "--dry-run"],
        ["site", "install", "--role", "env", "--prefix", "environments", "--bundle", "no-such.tar"],
    ],
    "site bundle": [["site", "bundle", "--role", "env", "-o", "no-such-directory/bundle.tar"]],
    "site metrics-targets": [["site", "metrics-targets", "-o", "prometheus"]],
    "site first-run": [["site", "first-run", "new"], ["site", "first-run", "new", "--from", "nowhere"]],
    "eval": [["eval", "mine.yaml", "--samples", "2"], ["eval", "RUN"]],
    "env try": [["env", "try", "mine.yaml", "--env", "reverse"]],
    "env check": [
        ["env", "check", "mine.yaml", "--env", "reverse", "--tasks", "1"],
        ["env", "check", "mine.yaml", "--cluster", "devcluster", "--job"],
    ],
    "swe make": [["swe", "make", "-o", "tasks", "-n", "1", "--offline", "--package", "nothing"]],
    "swe exercises": [["swe", "exercises", "-o", "tasks", "-n", "1", "--offline"]],
    "swe ls": [["swe", "ls", "no-tasks.jsonl"]],
    "swe show": [["swe", "show", "no-tasks.jsonl", "one"]],
    "swe check": [["swe", "check", "no-tasks.jsonl"]],
    "env sandbox": [["env", "sandbox"]],
    "mcp": [["mcp"]],
    "devcluster up": [["devcluster", "up", "--nodes", "0"]],
    **{
        f"devcluster {name}": [["devcluster", name]]
        for name in ("down", "status", "ls", "env", "shell", "pause-controller", "resume-controller")
    },
    **{f"devcluster {name}": [["devcluster", name, "dev-1"]] for name in ("kill-node", "revive-node")},
}
#: commands that cannot do anything without an extra, and which it is
NEED = {
    "warmup": "trainer",
    "model get": "hub",
    "checkpoint export": "trainer",
    "plan profile": "trainer",
    "report": "report",
    "board": "report",
    "mcp": "mcp",
}


def commands(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))
        else:
            yield " ".join((*prefix, name))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    sys.path.append(str(HERE.parent / "runs"))  # its helpers make runs that have ended
    from runs_testing import make_run, write_steps
    from test_rollout_commands import finish, make_rollout

    base = tmp_path_factory.mktemp("core")
    run = make_run(base / "runs", "night-1")
    write_steps(run, 3)
    write_character_tokenizer(base / "tokens")
    log = RolloutLog(run.rollouts_dir, attempt=1, restored=0, limit_s=5.0)
    finish(log, 1, make_rollout(0, ChatTokenizer(base / "tokens")))
    log.close()
    write_tiny_model(base / "model")
    (base / "mine.yaml").write_text(RECIPE)
    (base / "talks.yaml").write_text(TALKS)
    (base / "foreign.toml").write_text("max_steps = 3\n[orchestrator]\nbatch_size = 8\n")
    (base / "talks.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    lines = [[word.replace("RUN", "night-1") for word in line] for each in LINES.values() for line in each]
    (base / "lines.json").write_text(json.dumps(lines))
    (base / "site").mkdir()
    (base / "site/sitecustomize.py").write_text("from core_install import hide\nhide()\n")
    path = os.pathsep.join([str(base / "site"), str(HERE), str(HERE.parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "HPCRL_RUNS_ROOT": str(base / "runs"), "HOME": str(base)}
    environment["HPCRL_DEVCLUSTER_HOME"] = str(base / "devclusters")
    command = [sys.executable, HERE / "core_install.py", base / "lines.json"]
    done = subprocess.run(command, cwd=base, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    # what processes that a command starts print comes past its own streams
    assert "Traceback" not in done.stderr, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_command_is_tried() -> None:
    assert set(commands(typer.main.get_command(app))) == set(LINES)


def test_the_core_has_no_arrays() -> None:
    core = core_distributions()
    assert {"hpcrl", "pydantic", "pydantic-core", "aiohttp", "typer"} <= core
    assert not core & {"torch", "tokenizers", "safetensors", "pyarrow", "matplotlib"}


@pytest.mark.slow
def test_no_command_ends_in_a_traceback(ended: list[dict[str, Any]]) -> None:
    bad = [each for each in ended if each["traceback"] or "Traceback" in each["err"]]
    assert not bad, "\n".join(f"{each['words']}: {each['traceback'] or each['err']}" for each in bad)


@pytest.mark.slow
def test_what_is_missing_is_named(ended: list[dict[str, Any]]) -> None:
    for each in ended:
        for command, extra in NEED.items():
            if " ".join(each["words"]).startswith(command) and "-o" in each["words"][1:] + ["-o"] * (
                command in ("warmup", "mcp", "board")
            ):
                assert f"[{extra}]'" in each["err"], each
                assert each["code"] == 2
        if each["words"][:2] == ["site", "first-run"]:
            # login nodes have no more than the core: what needs an extra is done by interpreters of roles
            assert "extra" not in each["err"], each
        if "No module named" in each["err"]:
            assert "pip install" in each["err"], each
