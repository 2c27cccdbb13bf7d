"""``hpcrl eval``: a recipe, a run and a model evaluated by themselves, interrupted, resumed, and looked at again."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import ROOT, SLOW_RUN, Lab, events, processes, wait_step
from patience import patience, wait_for

from hpcrl.config.load import load_recipe
from hpcrl.dock.ledger.entries import Finished, read_entries
from hpcrl.runs.run_progress import read_set_evaluations
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import read_ledger

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "evaluation.md"


def finished(run: RunDir) -> list[tuple[int, int]]:
    directory = run.rollouts_dir / "ledger"
    entries = read_entries(directory) if directory.is_dir() else ()
    return [(entry.group, entry.member) for entry in entries if isinstance(entry, Finished)]


def evaluate(lab: Lab, target: str, *arguments: str) -> Any:
    model = () if target != "quickstart" else ("--set", f"model.path={lab.model}")
    return json.loads(lab.hpcrl("eval", target, *model, *arguments, "--json").stdout)


def test_the_start_model_of_a_recipe(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = evaluate(
        lab, "quickstart", "--samples", "3", "--prompts", "6", "--name", "mine", "--output", str(file), "--seed", "5"
    )
    assert json.loads(file.read_text()) == result
    assert (result["prompts"], result["samples"], result["temperature"]) == (6, 18, 1.0)
    assert list(result["by_env"]) == ["reverse", "calculator"]
    assert list(result["pass_at"]) == ["1", "2", "3"]
    for each in (result, *result["by_env"].values()):
        assert each["mean"]["low"] <= each["mean"]["value"] <= each["mean"]["high"]
    run = RunDir(lab.runs_root / "mine")
    # every sample is in the ledger, under its prompt, and its reward is that of the result
    assert sorted(finished(run)) == [(group, member) for group in range(6) for member in range(3)]
    rewards = [held.entry.reward for held in read_ledger(run).rollouts]
    assert result["mean"]["value"] == pytest.approx(sum(each or 0.0 for each in rewards) / 18)
    assert "nothing was lost" in lab.hpcrl("rollouts", "verify", "mine").stdout
    (step,) = lab.json("rollouts", "rescore", "mine")["steps"]
    assert (step["known"], step["changed"]) == (18, 0)
    # whoever asks for the run sees the result again, also with another seed another one
    assert evaluate(lab, "mine") == result
    assert "held-out set eval" in lab.hpcrl("status", "mine").stdout
    refused = lab.hpcrl("eval", "mine", "--output", str(file), check=False)
    assert (refused.returncode, "exists already" in refused.stderr) == (2, True)
    again = evaluate(lab, "quickstart", "--samples", "3", "--prompts", "6", "--seed", "5")
    assert again["mean"] == result["mean"]
    assert not processes(run)


def test_workers_give_the_same_result(lab: Lab, tmp_path: Path) -> None:
    """Environments in workers have the same prompts and rewards, and programs there reach the policy."""
    sizes = ("--samples", "2", "--prompts", "4", "--seed", "5")
    result = evaluate(lab, "quickstart", *sizes)
    workers = ("--set", "environment_workers.count=2", "--name", "workers")
    assert evaluate(lab, "quickstart", *sizes, *workers)["mean"] == result["mean"]
    roles = [component["role"] for component in lab.json("status", "workers")["components"]]
    assert sorted(roles) == ["engine", "env", "env", "orchestrator"]
    program, tasks = tmp_path / "ask.py", tmp_path / "tasks.jsonl"
    program.write_text(
        "import json, os, sys\nfrom openai import OpenAI\nmessages = json.load(sys.stdin)['messages']\n"
        "OpenAI().chat.completions.create(model=os.environ['OPENAI_MODEL'], messages=messages)\n"
        "print(json.dumps({'reward': 1.0}))\n"
    )
    tasks.write_text("".join(json.dumps({"prompt": f"reverse {word}"}) + "\n" for word in map(str, range(40))))
    settings = f"path: {tasks}, held_out_share: 0.5, command: ['{{python}}', {program}]"
    programs = ("--set", f"environments=[{{name: ask, kind: harness, {settings}}}]")
    found = evaluate(lab, "quickstart", *sizes, *workers[:2], *programs)
    assert (found["failed"], found["mean"]["value"]) == (0, 1.0)


def test_what_is_interrupted_continues(lab: Lab) -> None:
    """Samples that were made are not made again."""
    sizes = ("--samples", "10", "--prompts", "100", "--set", "rollouts.max_in_flight=8")
    lab.hpcrl("eval", "quickstart", "--set", f"model.path={lab.model}", *sizes, "--name", "cut", "--detach")
    run = RunDir(lab.runs_root / "cut")
    wait_for(lambda: len(finished(run)) > 20, 120 * patience(), "some samples")
    lab.hpcrl("cancel", "cut", "--yes")
    before = finished(run)
    assert 20 < len(before) < 1000
    shown = lab.hpcrl("eval", "cut", check=False)
    assert (shown.returncode, shown.stdout) == (130, "")
    assert "hpcrl resume cut" in shown.stderr
    lab.hpcrl("resume", "cut")
    result = evaluate(lab, "cut")
    assert result["samples"] == 1000
    after = finished(run)
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == 1000 - result["failed"]


def test_what_is_wrong_is_reported_before_anything_is_started(lab: Lab) -> None:
    for arguments, said in (
        (["nothing"], "nothing"),
        ([str(lab.model)], "--recipe RECIPE"),
        (["quickstart", "--recipe", "quickstart"], "--recipe is for model directories and runs"),
        (["quickstart", "--version", "3"], "--version needs a run"),
        (["quickstart", "--environment", "revers"], "there is no environment 'revers'"),
        (["quickstart", "--samples", "4", "--temperature", "0"], "at temperature 0 are one and the same"),
        (["quickstart", "--prompts", "1"], "1 prompts for 2 environments"),
    ):
        refused = lab.hpcrl("eval", *arguments, check=False)
        assert refused.returncode == 2, refused.stderr
        assert said in refused.stderr
        assert "Traceback" not in refused.stderr
    assert not lab.runs_root.exists() or not list(lab.runs_root.iterdir())


def test_an_evaluation_without_any_reward_fails_with_its_cause(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(
        "from hpcrl.rollouts.environments import Prompt\n"
        "class Env:\n"
        "    name = 'mine'\n"
        "    def prompt(self, split, index):\n"
        "        return Prompt(split, index, ({'role': 'user', 'content': f'{split} {index}'},))\n"
        "    async def rollout(self, prompt, policy):\n"
        "        raise LookupError('no judge')\n"
        "    def demonstration(self, prompt, *, correct, rng):\n"
        "        raise NotImplementedError\n"
    )
    lab.env["PYTHONPATH"] = f"{tmp_path}:{lab.env.get('PYTHONPATH', '')}"
    own = "environments=[{name: own, kind: custom, factory: 'raising:Env'}]"
    arguments = ("--set", f"model.path={lab.model}", "--set", own, "--prompts", "2", "--name", "fails")
    failed = lab.hpcrl("eval", "quickstart", *arguments, check=False)
    assert failed.returncode == 1, failed.stderr
    assert "no judge" in failed.stderr
    assert not (lab.runs_root / "fails" / "evaluation.json").exists()


def test_the_page_is_right(lab: Lab, tmp_path: Path) -> None:
    """Its recipe trains and evaluates its sets; its commands work, of this run and of its model."""
    text = PAGE.read_text()
    sets, benchmark = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    written = {**sets, "environments": benchmark["environments"]}
    written["evaluation"]["sets"] += benchmark["evaluation"]["sets"]
    written["evaluation"]["prompts"] = 4
    for each in written["evaluation"]["sets"]:
        each["prompts"] = 4
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({"extends": "quickstart", "name": "mine", **written}))
    assert [each.name for each in load_recipe(str(recipe)).value.evaluation.sets] == ["sampled", "words", "benchmark"]
    small = ("trainer.steps=3", "rollouts.rollouts_per_step=8", "rollouts.group_size=4", "rollouts.max_in_flight=16")
    run = lab.submit("trained", *small, recipe=str(recipe), to_end=True)
    found = [(each.set, each.version, each.samples) for each in read_set_evaluations(run)]
    once = [("benchmark", 4), ("sampled", 16), ("words", 4)]
    assert found == [(name, version, samples) for version in (0, 3) for name, samples in once]
    # what is for evaluation alone is not trained on
    assert {held.entry.environment for held in read_ledger(run).rollouts} == {"reverse"}
    assert "held-out set sampled: reward" in lab.hpcrl("status", "trained").stdout

    (tmp_path / "own_rewards.py").write_text("def score(reply, answer, row):\n    return 0.5\n")
    lab.env["PYTHONPATH"] = f"{tmp_path}:{lab.env.get('PYTHONPATH', '')}"
    words = {"RECIPE": "quickstart", "RUN": "trained", "MODEL": str(lab.model), "EVALUATION": "first"}
    words |= {"package.module:function": "own_rewards:score", "40": "1"}
    commands = [shlex.split(line) for line in re.findall(r"^    hpcrl (.*)$", text, re.MULTILINE)]
    assert len(commands) == 9
    for command in commands:
        if command[0] == "resume" or "--on-engines" in command:
            continue  # of one that was interrupted, or of one that trains: there are tests of their own
        line = [words.get(word, word) for word in command]
        if line[:2] == ["eval", "quickstart"]:
            line += ["--set", f"model.path={lab.model}", "--name", "first"]
        out = lab.hpcrl(*line).stdout
        assert "reward" in out or "pass_at" in out, line


def test_a_run_that_trains_evaluates_on_its_own_engines(lab: Lab) -> None:
    run = lab.submit("living", *SLOW_RUN)
    wait_step(run, 1)
    result = evaluate(lab, "living", "--on-engines", "--samples", "2", "--prompts", "4")
    assert (result["run"], result["prompts"], result["samples"]) == ("living", 4, 8)
    assert 0 <= result["version"] <= result["last_version"]
    (event,) = events(run, "evaluation.asked")
    assert event.data.items() <= result.items()
    refused = lab.hpcrl("eval", "living", "--on-engines", "--version", "1", check=False)
    assert (refused.returncode, "as they are" in refused.stderr) == (2, True)
    lab.hpcrl("cancel", "living", "--yes")
    lab.wait_end(run, 60.0)
    refused = lab.hpcrl("eval", "living", "--on-engines", check=False)
    assert (refused.returncode, "does not train now" in refused.stderr) == (2, True)
