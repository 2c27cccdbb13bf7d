"""Questions from a file in the process that a run gives them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from dataset_testing import OneReply, questions, write_jsonl
from harness import make_recipe
from patience import patience

from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments import Environment, EnvironmentRaisedError, build_environments, hosted, prompt_of
from hpcrl.rollouts.sampling.failures import describe_failure

REWARDS = [
    {"kind": "numeric", "extract": "last_line"},
    {"kind": "function", "function": "my_rewards:obedient", "name": "mine", "highest": 1e9},
    {"kind": "length", "limit_tokens": 10, "penalty": 0.5},
]


def recipe_of(path: Path, **changes: Any) -> Any:
    write_jsonl(path / "q.jsonl", [*questions(50), questions(1)[0]])
    config = {"name": "sums", "kind": "dataset", "path": str(path / "q.jsonl"), "rewards": REWARDS, **changes}
    return make_recipe(path, environments=[config])


@pytest.fixture
async def sums(tmp_path: Path) -> AsyncIterator[Environment]:
    (environment,) = build_environments(recipe_of(tmp_path))
    yield environment
    for each in hosted([environment]):
        await each.aclose()


async def test_a_rollout(sums: Environment) -> None:
    (process,) = hosted([sums])
    (note,) = process.notes
    assert note.startswith("1 rows are duplicates")
    prompt = await prompt_of(sums, "train", 5)
    number = int(prompt.messages[0]["content"].split()[2])
    outcome = await sums.rollout(prompt, OneReply(f"so it is\n{number + 1}", tokens=11))
    assert (outcome.reward, outcome.parts) == (0.5, {"numeric": 1, "mine": 0, "length": -0.5, "unfinished": 0})


async def test_failures_of_checkers_have_their_cause(sums: Environment) -> None:
    prompt = await prompt_of(sums, "train", 0)
    for order, cause, what in (
        ("raise", "raised", "ZeroDivisionError: no tests were found"),
        ("give nan", "unusable", "part 'mine' of the reward: its reward is nan"),
    ):
        with pytest.raises(EnvironmentRaisedError) as caught:
            await sums.rollout(prompt, OneReply(order))
        told, first = describe_failure(caught.value)
        assert told == cause
        assert what in first.what


async def test_processes_of_checkers_end_with_the_environment(sums: Environment) -> None:
    checker = int((await sums.rollout(await prompt_of(sums, "train", 0), OneReply("pid"))).parts["mine"])
    process = psutil.Process(checker)
    assert process.is_running()
    (environment,) = hosted([sums])
    await environment.aclose()
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(20 * patience())
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_every_mistake_is_reported_with_its_setting(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    (tmp_path / "q.jsonl").write_text("{\n[]\n")
    with pytest.raises(ConfigError) as caught:
        build_environments(recipe)
    assert [finding.key for finding in caught.value.findings] == ["environments.sums.path"] * 2
    with pytest.raises(ConfigError) as caught:
        build_environments(recipe_of(tmp_path, rewards=[{**REWARDS[1], "function": "my_rewards:nothing"}]))
    assert [finding.key for finding in caught.value.findings] == ["environments.sums.rewards.0"]
