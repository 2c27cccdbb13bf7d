"""Supervised runs by the command line: to the end, cancelled and resumed, and what is refused at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from lab import HPCRL, ROOT, Lab
from patience import patience, wait_for

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.weights.store import HandoffStore

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
RECIPE = "docs/examples/conversations/recipe.yaml"


def sft(lab: Lab, name: str, *settings: str, follow: bool = False, check: bool = True) -> tuple[RunDir, str]:
    sets = [part for s in (f"model.path={lab.model}", *settings) for part in ("--set", s)]
    done = lab.hpcrl("sft", RECIPE, "--name", name, *sets, *(["--follow"] if follow else []), check=check)
    return RunDir(lab.runs_root / name), done.stdout + done.stderr


def test_the_example_is_learned_and_its_version_is_a_start_model(lab: Lab) -> None:
    run, said = sft(lab, "whole", follow=True)
    assert "28 conversations for training, 2 held out; 160 steps" in said
    metrics = read_metrics(run)
    assert [record.step for record in metrics] == list(range(1, 161))
    assert metrics[-1].loss < metrics[0].loss / 3
    assert observe(run).state is RunState.COMPLETED
    assert {component.role for component in observe(run).components} == {"trainer"}
    # the epochs of the data are the steps of the run, for everybody who reads its recipe
    recipe = run.recipe()
    assert recipe.sft is not None
    assert (recipe.trainer.steps, recipe.sft.epochs) == (160, None)
    assert f"loss {metrics[-1].loss:.4f}" in lab.hpcrl("status", "whole").stdout
    assert "the run completed" in lab.hpcrl("why", "whole").stdout
    assert "epoch" in lab.hpcrl("checkpoint", "show", "whole").stdout
    # what it has learned begins other runs
    version = HandoffStore(run.weights_dir).open(160).path
    lab.hpcrl("submit", "quickstart", "--dry-run", "--set", f"model.path={version}")
    again = [
        part
        for s in ("trainer.steps=1", "trainer.optimizer.warmup_steps=0", f"model.path={lab.model}")
        for part in ("--set", s)
    ]
    lab.hpcrl("sft", RECIPE, "--name", "again", "--from", "whole", "--follow", *again)
    assert read_metrics(RunDir(lab.runs_root / "again"))[0].loss < metrics[0].loss / 2


def test_a_cancelled_run_is_resumed_where_it_was(lab: Lab) -> None:
    # a busy machine is cancelled after few steps, and a warm-up has to fit into the run that is resumed
    warmup = "trainer.optimizer.warmup_steps=2"
    run, _ = sft(lab, "broken", "sft.epochs=null", "trainer.steps=100000", "checkpoint.every_steps=5", warmup)
    wait_for(lambda: CheckpointLedger(run.checkpoints_dir).steps(), 120, "checkpoint")
    lab.hpcrl("cancel", "broken", "--yes")
    assert observe(run).state is RunState.CANCELLED
    saved = CheckpointLedger(run.checkpoints_dir).steps()[-1]
    # steps behind the checkpoint are done again
    done = read_metrics(run)[-1].step
    lab.hpcrl("resume", "broken", "--set", f"trainer.steps={done + 3}", "--follow")
    assert [record.step for record in read_metrics(run)] == list(range(1, done + 4))
    restored = [event for event in read_events(run) if event.kind == "trainer.restored"]
    assert [event.data["step"] for event in restored] == [saved]
    refused = lab.hpcrl("resume", "broken", "--set", "sft.conversations_per_step=3", check=False)
    assert refused.returncode == 2
    assert "cannot change in a run that has checkpoints" in refused.stderr


def test_bad_data_is_refused_before_anything_starts(lab: Lab, tmp_path: Path) -> None:
    data = tmp_path / "talks.jsonl"
    good = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    data.write_text(json.dumps(good) + "\n{broken\n" + json.dumps({"messages": good["messages"][:1]}) + "\n")
    run, said = sft(lab, "bad", f"sft.data={data}", check=False)
    assert not run.path.exists()
    # both, with file and line
    assert "talks.jsonl, line 2: no JSON" in said
    assert "talks.jsonl, line 3: no message has the role assistant" in said
    _, said = sft(lab, "bad", f"sft.data={tmp_path / 'nowhere.jsonl'}", check=False)
    assert "nowhere.jsonl cannot be read" in said
    _, said = sft(lab, "bad", "sft.max_len=5", check=False)
    assert "none of 30 conversations has at most 5 tokens" in said
    assert not run.path.exists()


def test_an_interrupt_while_data_is_read_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    data = tmp_path / "talks.jsonl"
    os.mkfifo(data)
    command = [
        HPCRL,
        "sft",
        RECIPE,
        "--name",
        "stopped",
        "--set",
        f"model.path={lab.model}",
        "--set",
        f"sft.data={data}",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=lab.env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    # opened by both: somebody reads it
    with data.open("w"):
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60 * patience())
    assert process.returncode == 130
    assert "Traceback" not in said
    assert not (lab.runs_root / "stopped").exists()


def test_recipes_without_conversations_and_with_rollouts_are_refused(lab: Lab) -> None:
    done = lab.hpcrl("sft", "quickstart", check=False)
    assert done.returncode == 2
    assert "has no section sft" in done.stderr
    _, said = sft(lab, "bad", "rollouts.group_size=4", "trainer.router_replay=true", check=False)
    assert "the section rollouts has no effect in a supervised run" in said
    assert "trainer.router_replay" in said


def test_a_plan_has_the_trainer_alone(lab: Lab) -> None:
    done = lab.hpcrl("plan", RECIPE, "--set", f"model.path={lab.model}", "--json")
    plan = json.loads(done.stdout)
    assert [group["role"] for group in plan["groups"]] == ["trainer"]
    assert plan["forecast"]["starts"]["ok"] is True
