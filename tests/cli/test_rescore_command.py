"""``hpcrl rollouts rescore``: rewards of stored rollouts computed again, from tokens or from the text that is kept."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from start_models import write_tiny_model

import hpcrl as hpcrl_package
from hpcrl.cli.main import main
from hpcrl.config.cluster import LocalCluster, PathsConfig
from hpcrl.config.load import load_recipe
from hpcrl.dock.ledger.entries import Dropped, Finished, Kept, Taken
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.jobplan import absolute_paths, make_plan
from hpcrl.rollouts.core.records import Rollout, Turn, encode_rollout
from hpcrl.rollouts.environments import build_environments, hosted
from hpcrl.rollouts.rendering import Renderer
from hpcrl.runs.rundir import RunDir

Rescore = Callable[..., tuple[int, str, str]]

RECIPE = """\
extends: quickstart
name: mine
model: {path: model}
rollouts: {group_size: 2, rollouts_per_step: 4}
environments:
  - name: sums
    kind: dataset
    path: questions.jsonl
    columns: {prompt: question}
    held_out_share: 0.25
    rewards:
      - {kind: numeric}
      - {kind: format, pattern: "the answer is.*", weight: 0.5}
  - {name: letters, kind: words, task: reverse}
"""
MODULE = """\
def half(reply, answer, row):
    return 0.5

def strict(reply, answer, row):
    if "seven" in reply:
        raise LookupError("seven is not a number")
    return float(reply.split()[-1] == answer.strip())

def prompted(reply, answer, row):
    return float(row["messages"][-1]["content"].startswith("reverse ") and answer == "")
"""


class Writer:
    """Writes rollouts of a run as its orchestrator would."""

    def __init__(self, run: RunDir, recipe: Any) -> None:
        self.run = run
        self._environments = {each.name: each for each in build_environments(recipe)}
        self._renderer = Renderer.of_model(Path(recipe.model.path))
        self._log = RolloutLog(run.rollouts_dir, attempt=1, restored=0, limit_s=5.0)
        self.lines: dict[tuple[int, int], dict[str, Any]] = {}

    def question(self, name: str, index: int) -> str:
        return str(self._environments[name].prompt("train", index).messages[-1]["content"])

    def finish(self, group: int, member: int, name: str, reply: str, reward: float, *, cut: bool = False) -> None:
        prompt = self._environments[name].prompt("train", group)
        said = self._renderer.opening(prompt.messages)
        end = [] if cut else [self._renderer.stop_token_ids[0]]
        sampled = [*self._renderer.ids_of_text(reply), *end]
        mask = [0] * len(said) + [1] * len(sampled)
        turn = Turn(len(said), len(sampled), 0.5, 2.0)
        rollout = Rollout(
            member=member,
            token_ids=np.asarray([*said, *sampled], np.int32),
            sampled=np.asarray(mask, np.uint8),
            logprobs=np.zeros(len(mask), np.float32),
            versions=np.zeros(len(mask), np.int32),
            reward=reward,
            parts={"unfinished": float(cut)},
            seconds=1.5,
            ended_s=1_790_000_000.0,
            turns=[turn],
        )
        text = self._renderer.full_text([*said, *sampled])
        self.lines[group, member] = {"group": group, "member": member, "text": text, "turns": [list(turn_of(turn))]}

        def entry(place: Any) -> Finished:
            numbers = {"first_version": 0, "last_version": 0, "tokens": len(mask), "sampled_tokens": len(sampled)}
            about = {"environment": name, "prompt_index": group, "reward": reward, "ended_s": rollout.ended_s}
            return Finished(group=group, member=member, payload=place, **numbers, **about)  # type: ignore[arg-type]

        self._log.finish(*encode_rollout(rollout), entry)

    def take(self, step: int, groups: list[int]) -> None:
        for group in groups:
            self._log.append(Kept(group=group))
        members = [(group, [member for g, member in self.lines if g == group]) for group in groups]
        self._log.append(Taken(step=step, groups=members))
        lines = [self.lines[group, member] for group, each in members for member in each]
        text = "".join(json.dumps({**line, "parts": {}, "seconds": 1.5}) + "\n" for line in lines)
        (self.run.rollouts_dir / f"step-{step:06d}.jsonl").write_text(text)

    def drop(self, group: int) -> None:
        self._log.append(Kept(group=group))
        self._log.append(Dropped(group=group, members=[0, 1], why="too old"))

    def close(self) -> None:
        self._log.close()
        for environment in hosted(list(self._environments.values())):
            environment.close()


def turn_of(turn: Turn) -> tuple[Any, ...]:
    return turn.said, turn.sampled, turn.wait_s, turn.reply_s


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 are of sums, step 3 of words, and group 5 was dropped."""
    base = tmp_path_factory.mktemp("written")
    (base / "modules").mkdir()
    (base / "modules/own_rewards.py").write_text(MODULE)
    write_tiny_model(base / "model")
    (base / "recipe.yaml").write_text(RECIPE)
    rows = [{"question": f"What is {i} plus 2?", "answer": str(i + 2)} for i in range(40)]
    (base / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = absolute_paths(load_recipe(str(base / "recipe.yaml")).value, base)
    cluster = LocalCluster(name="local", kind="local", paths=PathsConfig(runs_root=str(base / "runs")))
    run = RunDir(base / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.record_path.write_text("{}")
    run.write_configuration(recipe, cluster, make_plan(recipe, cluster, "mine", run.path))
    writer = Writer(run, recipe)
    for group in range(4):
        number = int(writer.question("sums", group).split()[2]) + 2
        writer.finish(group, 0, "sums", f"the answer is {number}", 1.5)
        writer.finish(group, 1, "sums", "the answer is seven", 0.5)
    writer.take(1, [0, 1])
    writer.take(2, [2, 3])
    word = writer.question("letters", 4).split()[1]
    for member, reply in enumerate(("-", word[::-1])):
        writer.finish(4, member, "letters", reply, 0.25, cut=bool(member))
        writer.finish(5, member, "sums", "no idea", 1.0)
    writer.take(3, [4])
    writer.drop(5)
    writer.close()
    return base


@pytest.fixture
def run(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A copy of the run with all that it names, for a test to spoil."""
    copy = tmp_path / "copy"
    shutil.copytree(written, copy)
    run = RunDir(copy / "runs" / "mine")
    for path in (run.recipe_path, run.cluster_path, run.plan_path):
        path.write_text(path.read_text().replace(str(written), str(copy)))
    # the interpreter that computes rewards may have another checkout installed
    checkout = Path(hpcrl_package.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{copy / 'modules'}{os.pathsep}{checkout}")
    return run


@pytest.fixture
def rescore(run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Rescore:
    def call(*arguments: str) -> tuple[int, str, str]:
        argv = ["hpcrl", "rollouts", "rescore", "mine", *arguments, "--runs-root", str(run.path.parent)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capfd.readouterr()
        return int(exit_info.value.code or 0), out, err

    return call


def steps_of(out: str) -> dict[Any, dict[str, Any]]:
    document = json.loads(out)
    return {each["step"] or each["state"]: each for each in document["steps"]}


def test_the_recipes_own_rewards_are_what_they_were_but_for_what_was_changed(run: RunDir, rescore: Rescore) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    code, out, err = rescore("--json")
    assert code == 0, err
    steps = steps_of(out)
    for step in (1, 2):
        assert (steps[step]["known"], steps[step]["changed"], steps[step]["reordered"]) == (4, 0, 0)
        assert steps[step]["mean_before"] == steps[step]["mean_after"] == 1.0
    # words give a share for letters, and the ledger was written with another reward
    assert (steps[3]["known"], steps[3]["changed"]) == (2, 2)
    assert (steps["dropped"]["mean_before"], steps["dropped"]["mean_after"]) == (1.0, 0.0)
    assert json.loads(out)["unknown"] == json.loads(out)["failed"] == {}
    assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before


def test_another_reward_changes_steps_and_says_so_in_a_table(rescore: Rescore) -> None:
    code, out, err = rescore("--reward", "own_rewards:half", "--environment", "sums", "--state", "trained")
    assert code == 0, err
    head, *rows = out.splitlines()
    assert head.split()[:6] == ["step", "rollouts", "known", "reward", "again", "changed"]
    assert head.split()[6:] == ["groups", "reordered", "varied", "again"]
    assert [row.split() for row in rows] == [
        ["1", "4", "4", "1.000", "0.500", "50.0%", "2", "2", "2", "0"],
        ["2", "4", "4", "1.000", "0.500", "50.0%", "2", "2", "2", "0"],
    ]


def test_a_function_that_raises_is_a_failure_and_not_a_zero(rescore: Rescore) -> None:
    code, out, _ = rescore("--reward", "own_rewards:strict", "--step", "1", "--json")
    assert code == 1
    step = steps_of(out)[1]
    assert (step["rollouts"], step["known"], step["failed"], step["mean_after"]) == (4, 2, 2, 1.0)
    ((why, count),) = json.loads(out)["failed"].items()
    assert "LookupError: seven is not a number" in why
    assert count == 2


def test_environments_without_answers_are_unknown_to_checkers_that_compare(rescore: Rescore) -> None:
    code, out, _ = rescore("--reward", "numeric", "--environment", "letters", "--json")
    assert code == 0
    assert (steps_of(out)[3]["known"], steps_of(out)[3]["unknown"]) == (0, 2)
    assert steps_of(out)[3]["mean_after"] is None
    _, out, _ = rescore("--reward", "own_rewards:prompted", "--environment", "letters", "--json")
    assert (steps_of(out)[3]["known"], steps_of(out)[3]["mean_after"]) == (2, 1.0)


def test_where_tokens_are_gone_the_text_does(run: RunDir, rescore: Rescore) -> None:
    for path in (run.rollouts_dir / "payload").iterdir():
        path.unlink()
    lines = run.rollouts_dir / "step-000002.jsonl"
    changed = [json.loads(line) for line in lines.read_text().splitlines()]
    changed[0]["text"] += "x" * 5000
    changed[1]["text"] = "some other prompt"
    del changed[2]["text"]
    changed[3]["turns"] = [[1, 2, 0, 0], [3, 4, 0, 0]]
    lines.write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    code, out, err = rescore("--json", "--audit")
    assert code == 0, err
    steps = steps_of(out)
    assert (steps[1]["known"], steps[1]["changed"]) == (4, 0)
    assert (steps[2]["known"], steps[2]["unknown"]) == (0, 4)
    assert sorted(json.loads(out)["unknown"].values()) == [1, 1, 1, 3]  # what was dropped has no text
    # the one that was cut has no end in its text
    assert json.loads(out)["audit"]["letters"]["suspicious"]["truncated"]["ids"] == ["4/1"]


def test_a_file_that_was_changed_since_makes_rewards_unknown(run: RunDir, rescore: Rescore) -> None:
    rows = [{"question": f"How much is {i} plus 3?", "answer": str(i + 3)} for i in range(40)]
    (run.path.parents[1] / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, out, _ = rescore("--state", "trained", "--environment", "sums")
    assert code == 0
    assert "unknown: 8 rollouts: its environment gives another prompt now" in out


def test_the_audit_names_format_alone_and_duplicates(rescore: Rescore) -> None:
    code, out, err = rescore("--audit", "--environment", "sums")
    assert code == 0, err
    text = out[out.index("audit of sums") :]
    assert text.splitlines()[0] == "audit of sums: 8 of 10 rollouts have a reward above 0"
    assert "  format alone: 4 rollouts, 50.0% of these, 25.0% of all reward" in text
    assert "    4 times to 4 prompts, reward 0.500: 'the answer is seven'" in text
    assert "  suspicious: none" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--reward", "nowhere:score"], "module 'nowhere' cannot be imported"),
        (["--reward", "own_rewards:none"], "'own_rewards' has no function 'none'"),
        (["--reward", "numerical"], "numerical"),
        (["--reward", "{kind: exact, extrat: boxed}"], "extrat"),
        (["--reward", "{kind: exact"], "is not a reward"),
        (["--reward", "a b"], "is not a reward"),
        (["--reward", "numeric", "--reward", "numeric"], "two rewards are called 'numeric'"),
        (["--environment", "other"], "no rollout has the environment 'other'"),
        (["--state", "lost"], "there is no state 'lost'"),
    ],
)
def test_what_is_wrong_is_reported(rescore: Rescore, arguments: list[str], said: str) -> None:
    code, out, err = rescore(*arguments)
    assert (code, out) == (2, ""), err
    assert said in err
    assert "Traceback" not in err


def test_programs_that_another_user_has_named_are_not_started(
    rescore: Rescore, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = run.recipe_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    code, _, err = rescore()
    assert code == 2
    assert "another user's" in err


def test_a_run_whose_model_is_gone_is_refused(run: RunDir, rescore: Rescore) -> None:
    (run.path.parents[1] / "model/tokenizer.json").unlink()
    code, _, err = rescore()
    assert code == 2
    assert "rewards cannot be computed again" in err
    assert "Traceback" not in err


def test_text_of_the_policy_reaches_no_terminal(rescore: Rescore, run: RunDir) -> None:
    (run.path.parents[1] / "modules/own_rewards.py").write_text(
        'def half(*_):\n    raise ValueError("\\x1b]0;title\\x07")\n'
    )
    code, out, _ = rescore("--reward", "own_rewards:half")
    assert code == 1
    assert "title" in out
    assert "\x1b" not in out
