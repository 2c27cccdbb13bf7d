"""Procedural tasks of the library ``reasoning_gym``: with the real one where it is installed, and with a stand-in."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from dataset_testing import OneReply
from harness import make_recipe

from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments import Environment, EnvironmentRaisedError, build_environments, hosted, prompt_of

ROOT = Path(__file__).resolve().parents[3]
REAL = ROOT / ".reasoning-gym"
#: as far as the environment knows the library
STAND_IN = """\
from random import Random


class Sums:
    def __init__(self, seed, size, largest=99):
        if largest < 1:
            raise ValueError("largest must be positive")
        self.seed, self.size, self.largest = seed, size, largest

    def __getitem__(self, number):
        rng = Random(self.seed + number)
        a, b = rng.randint(0, self.largest), rng.randint(0, self.largest)
        # the order of a set of texts is another one in each process, unless that is fixed
        words = ", ".join({"stone", "river", "cloud", "field"})
        return {"question": f"What is {a} + {b}? Ignore {words}.", "answer": str(a + b), "metadata": {}}

    def score_answer(self, answer, entry):
        if answer == "break":
            raise KeyError("no such answer")
        if answer == "two":
            return 2.0
        return 1.0 if int(answer) == int(entry["answer"]) else 0.01


class Mute(Sums):
    def __getitem__(self, number):
        return {**super().__getitem__(number), "answer": None}

    def score_answer(self, answer, entry):
        return 0.5


def create_dataset(name, seed, size, **parameters):
    from reasoning_gym.factory import DATASETS
    return DATASETS[name](seed, size, **parameters)
"""
FACTORY = "from reasoning_gym import Mute, Sums\n\nDATASETS = {'sums': Sums, 'mute': Mute}\n"

LENGTH = {"kind": "length", "limit_characters": 50, "penalty": 0.25}
RNG = random.Random(0)
Build = Callable[..., Environment]


@pytest.fixture
async def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Build]:
    """Builds an environment whose process has the stand-in, or the real library."""
    async with AsyncExitStack() as stack:

        def make(tasks: dict[str, Any], *, real: bool = False, **changes: Any) -> Environment:
            if real and REAL.is_dir():
                monkeypatch.syspath_prepend(REAL)
            elif not real:
                (tmp_path / "reasoning_gym").mkdir(exist_ok=True)
                (tmp_path / "reasoning_gym/__init__.py").write_text(STAND_IN)
                (tmp_path / "reasoning_gym/factory.py").write_text(FACTORY)
                monkeypatch.syspath_prepend(tmp_path)
            config = {"name": "puzzles", "kind": "reasoning_gym", "tasks": tasks, **changes}
            (environment,) = build_environments(make_recipe(tmp_path, environments=[config]))
            for each in hosted([environment]):
                stack.push_async_callback(each.aclose)
            return environment

        yield make


def numbers_in(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]


async def reward_of(environment: Environment, reply: str, index: int = 0) -> float:
    prompt = await prompt_of(environment, "train", index)
    return (await environment.rollout(prompt, OneReply(reply))).reward


def said(environment: Environment, split: Any, count: int) -> list[str]:
    return [environment.prompt(split, index).messages[-1]["content"] for index in range(count)]


async def test_questions_are_stable_and_the_two_sets_never_meet(build: Build) -> None:
    # few questions, so that other seeds give the same ones
    tasks = {"sums": {"parameters": {"largest": 9}}}
    environment = build(tasks)
    train, held_out = said(environment, "train", 400), said(environment, "heldout", 60)
    assert not {*train} & {*held_out}
    assert len({*train}) > 40
    assert len({*held_out}) > 10
    # in another process as well
    again = build(tasks)
    assert (said(again, "train", 400), said(again, "heldout", 60)) == (train, held_out)


async def test_a_wrong_demonstration_has_another_answer(build: Build) -> None:
    environment = build({"sums": {"parameters": {"largest": 1}}})
    for index in range(12):
        prompt = environment.prompt("train", index)
        right, wrong = (environment.demonstration(prompt, correct=correct, rng=RNG) for correct in (True, False))
        assert right[-1]["content"] != wrong[-1]["content"]


async def test_rewards_are_the_scores_of_the_library(build: Build) -> None:
    environment = build({"sums": {}}, extract="answer_tag", system="Use <answer>.", rewards=[LENGTH])
    prompt = environment.prompt("train", 3)
    assert prompt.messages[0] == {"role": "system", "content": "Use <answer>."}
    a, b = numbers_in(prompt.messages[1]["content"])
    right = f"<answer>{a + b}</answer>"
    assert environment.demonstration(prompt, correct=True, rng=RNG)[-1]["content"] == right
    wrong = environment.demonstration(prompt, correct=False, rng=RNG)[-1]["content"]
    assert wrong != right
    assert await reward_of(environment, right, 3) == 1.0
    assert await reward_of(environment, "<answer>7000</answer>", 3) == 0.01
    assert await reward_of(environment, str(a + b), 3) == 0.0
    outcome = await environment.rollout(await prompt_of(environment, "train", 3), OneReply(f"{'.' * 99}{right}"))
    assert (outcome.reward, outcome.parts) == (0.75, {"score": 1.0, "length": -0.25, "unfinished": 0.0})


async def test_a_scorer_that_raises_fails_the_rollout_and_is_named_before(build: Build) -> None:
    environment = build({"sums": {}})
    (process,) = hosted([environment])
    assert process.notes == [
        "the scorer of sums raises ValueError for the answer 'x': such rollouts fail, or score 0 with "
        "scorer_errors: zero"
    ]
    with pytest.raises(EnvironmentRaisedError, match="part 'score' of the reward: KeyError: 'no such answer'"):
        await reward_of(environment, "break")
    with pytest.raises(EnvironmentRaisedError, match="its score is 2, which is not from 0 to 1") as caught:
        await reward_of(environment, "two")
    assert caught.value.cause == "unusable"


async def test_what_a_scorer_raises_may_count_as_wrong(build: Build) -> None:
    environment = build({"sums": {}}, scorer_errors="zero")
    assert hosted([environment])[0].notes == []
    assert await reward_of(environment, "break") == 0.0


async def test_tasks_have_shares(build: Build) -> None:
    environment = build({"sums": {"weight": 3}, "mute": {"parameters": {"largest": 100_000}}})
    large = [max(numbers_in(text)) > 99 for text in said(environment, "train", 400)]
    assert 0.18 < sum(large) / 400 < 0.32
    index = large.index(True)
    with pytest.raises(NotImplementedError, match="no answers of mute"):
        environment.demonstration(environment.prompt("train", index), correct=True, rng=RNG)


@pytest.mark.parametrize(
    ("tasks", "what"),
    [
        ({"summs": {}}, "has no task 'summs'\n    hint: it has mute, sums"),
        ({"sums": {"parameters": {"largest": 0}}}, "cannot make 'sums': ValueError: largest must be positive"),
        ({"sums": {"parameters": {"smallest": 0}}}, "cannot make 'sums': TypeError: "),
        ({"sums": {"parameters": {"seed": 1}}}, "parameters of 'sums' have 'seed'"),
    ],
)
async def test_what_the_library_does_not_know(build: Build, tasks: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tasks)
    assert re.search(f"environments.puzzles.tasks: .*{re.escape(what)}", str(caught.value))


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="it is installed")
async def test_a_library_that_is_missing_is_named(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.REAL", Path("/nowhere"))
    with pytest.raises(ConfigError, match=r"'reasoning_gym', which cannot be imported(.|\n)*\[reasoning-gym\]'"):
        build({"chain_sum": {}}, real=True)


@pytest.mark.skipif(
    not REAL.is_dir() and importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning_gym is not installed (tools/bootstrap.py --reasoning-gym)",
)
async def test_real_tasks(build: Build) -> None:
    # the second goes through sets of texts
    names = ["chain_sum", "isomorphic_strings", "leg_counting", "survo", "knights_knaves"]
    tasks: dict[str, Any] = {name: {} for name in names}
    environment = build({**tasks, "chain_sum": {"parameters": {"min_terms": 2, "max_terms": 2}}}, real=True)
    train, held_out = said(environment, "train", 40), said(environment, "heldout", 20)
    assert not {*train} & {*held_out}
    again = build(tasks, real=True)
    assert [text for text in said(again, "train", 40) if "isomorphic" in text] == [
        text for text in train if "isomorphic" in text
    ]
    shown = [environment.demonstration(environment.prompt("train", i), correct=True, rng=RNG) for i in range(20)]
    assert {await reward_of(environment, each[-1]["content"], i) for i, each in enumerate(shown)} == {1.0}
    assert await reward_of(environment, "nothing", 0) < 0.5
