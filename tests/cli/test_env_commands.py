"""Environments of one's own are tried before there is a run: `recipe check`, `submit`, `env try`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from start_models import write_tiny_model

import hpcrl as hpcrl_package
from hpcrl.cli.main import main

Hpcrl = Callable[..., tuple[int, str]]

MODULE = """\
import time

from hpcrl.rollouts.environments import Outcome, Prompt


class Counting:
    def __init__(self, limit, broken=""):
        self.limit, self.broken = limit, broken
        if broken == "hangs":
            time.sleep(600)

    def prompt(self, split, index):
        if self.broken == "prompt":
            return {}["no such task"]
        return Prompt(split=split, index=index, messages=({"role": "user", "content": f"{split} {index}"},))

    async def rollout(self, prompt, policy):
        if self.broken == "rollout":
            return judge(prompt)
        if self.broken == "behind a reply":
            return await self.with_tool(prompt, policy)
        if self.broken in BAD_NUMBERS:
            reward, part = BAD_NUMBERS[self.broken]
            return Outcome(reward=reward, parts={"coverage": part})
        while self.broken == "endless" and (await policy.reply(prompt.messages)).finished:
            pass
        reply = await policy.reply(prompt.messages)
        return Outcome(reward=0.25, parts={"letters": float(len(reply.text))})

    async def with_tool(self, prompt, policy):
        reply = await policy.reply(prompt.messages)
        if reply.text.startswith("eight"):
            return ITEMZ[reply.text]
        return Outcome(reward=0.0)

    def demonstration(self, prompt, *, correct, rng):
        if self.broken == "shy":
            raise NotImplementedError
        return (*prompt.messages, {"role": "assistant", "content": "eight"})


BAD_NUMBERS = {
    "nan": (float("nan"), 1.0),
    "huge": (10**400, 1.0),
    "text": ("0.5", 1.0),
    "nothing": (None, 1.0),
    "complex": (1j, 1.0),
    "part": (0.5, float("inf")),
}


def judge(prompt):
    raise ZeroDivisionError("a test suite without tests")
"""


@pytest.fixture
def hpcrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Hpcrl:
    """A command beside a recipe with an environment of one's own; the exit code, and what it prints."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/counting_tasks.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(
        "extends: quickstart\nname: mine\nenvironments:\n"
        '  - {name: count, kind: custom, factory: "counting_tasks:Counting", args: {limit: 9}}\n'
    )
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, **changes: object) -> tuple[int, str]:
        sets = [part for key, value in changes.items() for part in ("--set", f"environments.0.{key}={value}")]
        monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments, *sets])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, out + err

    return call


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"factory": "counting:Counting"}, "module 'counting' cannot be imported: No module named 'counting'"),
        ({"factory": "counting_tasks:Count"}, "'counting_tasks' has no callable 'Count'"),
        ({"args": "{limitt: 9}"}, "raised TypeError: Counting.__init__() got an unexpected keyword argument 'limitt'"),
        ({"args": "{limit: 9, broken: hangs}", "start_timeout_s": 0.5}, "gave no answer within 0.5 s"),
    ],
)
def test_what_cannot_be_made_is_found_before_the_run(hpcrl: Hpcrl, changes: dict[str, object], said: str) -> None:
    code, out = hpcrl("recipe", "check", "recipe.yaml", **changes)
    assert code == 2, out
    assert said in out
    assert "environments.count.factory" in out
    assert "hint: " in out
    assert "good" not in out


def test_a_recipe_whose_environments_can_be_made_is_good(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("recipe", "check", "recipe.yaml")
    assert code == 0, out
    assert "1 of your environments made" in out
    # one that needs its nodes says so, and is left alone
    code, out = hpcrl("recipe", "check", "recipe.yaml", factory="nowhere:Thing", try_before_submit="false")
    assert (code, "environments made" in out) == (0, False)


def test_a_submit_tries_them_too(hpcrl: Hpcrl, tmp_path: Path) -> None:
    code, out = hpcrl("submit", "recipe.yaml", "--set", f"model.path={tmp_path / 'model'}", args="{limitt: 9}")
    assert code == 2
    assert "recipe.yaml" in out or "--set" in out
    assert "unexpected keyword argument 'limitt'" in out
    assert not (tmp_path / "runs").exists()


def test_a_job_has_not_the_path_of_the_shell(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("recipe", "check", "recipe.yaml", "--cluster", "devcluster")
    assert code == 2
    assert "No module named 'counting_tasks'" in out
    assert "the profile's env" in out


def test_one_task_is_tried(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("env", "try", "recipe.yaml", "--task", "7")
    assert code == 0
    assert out.splitlines() == [
        "count, training task 7",
        "prompt",
        "  user: train 7",
        "demonstration",
        "  user: train 7",
        "  assistant: eight",
        "rollout with a policy with empty replies",
        "  user: train 7",
        "  assistant: (nothing)",
        "  reward 0.25, letters 0",
        "rollout with a policy that replies with the demonstration",
        "  user: train 7",
        "  assistant: eight",
        "  reward 0.25, letters 5",
    ]
    code, out = hpcrl("env", "try", "recipe.yaml", "--json", args="{limit: 9, broken: shy}")
    shown = json.loads(out)["environments"]["count"]
    assert (code, shown["demonstration"], shown["reward"]) == (0, None, 0.25)
    assert "demonstrated" not in shown
    code, out = hpcrl("env", "try", "recipe.yaml", "--env", "other")
    assert code == 2
    assert "it has count" in out


@pytest.mark.parametrize(
    ("broken", "stage", "error", "frame"),
    [
        ("prompt", "prompt", "KeyError: 'no such task'", 'in prompt: return {}["no such task"]'),
        ("rollout", "rollout", "ZeroDivisionError: a test suite without tests", "in judge: raise ZeroDivisionError"),
    ],
)
def test_what_it_raises_is_shown_with_its_own_frames(
    hpcrl: Hpcrl, broken: str, stage: str, error: str, frame: str
) -> None:
    code, out = hpcrl("env", "try", "recipe.yaml", args=f"{{limit: 9, broken: {broken}}}")
    assert code == 1
    assert f"{stage}: environment 'count' raised {error}" in out
    assert frame in out
    # no frame of ours; where the text breaks depends on how long the path is
    package = Path(hpcrl_package.__file__).parent / "rollouts"
    assert "".join(str(package).split()) not in "".join(out.split())


def test_code_behind_a_reply_runs_with_the_turns_of_the_demonstration(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("env", "try", "recipe.yaml", args="{limit: 9, broken: behind a reply}")
    assert code == 1
    assert "rollout with a policy with empty replies" in out
    assert "rollout of the demonstration: environment 'count' raised NameError: name 'ITEMZ' is not defined" in out
    assert "counting_tasks.py" in out
    assert "in with_tool: return ITEMZ[reply.text]" in out
    shown = json.loads(hpcrl("env", "try", "recipe.yaml", "--json", args="{limit: 9, broken: behind a reply}")[1])
    found = shown["environments"]["count"]
    assert (found["reward"], found["failed"]) == (0.0, "rollout of the demonstration")
    assert [failure["stage"] for failure in found["errors"]] == ["rollout of the demonstration"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nan", "its reward is nan, which is not finite"),
        ("huge", "its reward is an integer of 1329 bits, which is too large"),
        ("text", "its reward is '0.5' (str), which is not a number"),
        ("nothing", "its reward is None (NoneType), which is not a number"),
        ("complex", "its reward is 1j (complex), which is not a number"),
        ("part", "part 'coverage' of a reward is inf, which is not finite: a run leaves it out"),
    ],
)
def test_a_reward_that_is_not_a_number_is_reported_in_words(hpcrl: Hpcrl, kind: str, said: str) -> None:
    code, out = hpcrl("env", "try", "recipe.yaml", args=f"{{limit: 9, broken: {kind}}}")
    assert (code, said in out, "Traceback" in out) == (1, True, False), out
    if kind != "part":
        assert "counting_tasks.py:17 in rollout" in out  # where it is defined


def test_a_rollout_that_never_ends_by_itself_is_cut_off(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("env", "try", "recipe.yaml", "--json", args="{limit: 9, broken: endless}")
    assert code == 0
    assert len(json.loads(out)["environments"]["count"]["conversation"]) == 2 * 65


def test_held_out_tasks_that_are_those_of_training_are_reported(hpcrl: Hpcrl, tmp_path: Path) -> None:
    said = "32 of the first 32 held-out prompts are training prompts as well"
    assert "held-out prompts" not in hpcrl("recipe", "check", "recipe.yaml")[1]
    module = tmp_path / "modules/counting_tasks.py"
    module.write_text(MODULE.replace('f"{split} {index}"', 'f"task {index}"'))
    code, out = hpcrl("recipe", "check", "recipe.yaml")
    assert (code, f"environment count: {said}" in out) == (0, True), out
    assert said in hpcrl("env", "try", "recipe.yaml")[1]
