"""Environments with ``load_environment``: with a stand-in for verifiers, and with the real one where there is one.

``HPCRL_TEST_CLASSIC_VERIFIERS`` names an interpreter that has a verifiers older than 0.4 and ``datasets``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.verifiers_environment import VerifiersEnv
from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments.base import Message, Reply
from hpcrl.rollouts.environments.trial import NullPolicy
from hpcrl.rollouts.environments.verifiers.environment import VerifiersEnvironment, VerifiersRolloutError

REAL = os.environ.get("HPCRL_TEST_CLASSIC_VERIFIERS")
#: as far as environments and the worker know the library
STAND_IN = """
import json, os, types as kinds, urllib.error, urllib.request
from dataclasses import dataclass

import sys


@dataclass
class ClientConfig:
    api_base_url: str
    api_key_var: str
    max_retries: int


types = kinds.ModuleType("verifiers.types")
types.ClientConfig = ClientConfig
sys.modules["verifiers.types"] = types


class Rubric:
    def __init__(self, funcs, weights):
        self.funcs, self.weights = funcs, weights


class MultiTurnEnv:
    def __init__(self, dataset, rubric, eval_dataset=None):
        self.dataset, self.eval_dataset, self.rubric = dataset, eval_dataset, rubric

    def get_dataset(self):
        return self.dataset

    def get_eval_dataset(self):
        return self.eval_dataset

    async def env_response(self, messages, state):
        return []

    async def run_rollout(self, row, client, model, sampling):
        assert client.max_retries == 0
        messages, completion, ended = list(row["prompt"]), [], None
        while ended is None:
            body = json.dumps({"model": model, "messages": messages}).encode()
            headers = {"Authorization": "Bearer " + os.environ[client.api_key_var]}
            try:
                request = urllib.request.Request(client.api_base_url + "/chat/completions", body, headers)
                import asyncio
                with await asyncio.to_thread(urllib.request.urlopen, request) as answer:
                    said = json.load(answer)["choices"][0]["message"]
            except urllib.error.HTTPError as error:
                ended = "prompt_too_long" if "context_length" in error.read().decode() else "error"
                break
            completion.append({"role": "assistant", "content": said["content"]})
            messages.append(completion[-1])
            if await self.done(len(completion)):
                ended = "done"
            else:
                messages += await self.env_response(messages, {})
        rewards = {}
        for function in self.rubric.funcs:
            try:
                rewards[function.__name__] = await function(completion=completion, answer=row["answer"])
            except Exception:
                rewards[function.__name__] = 0.0
        return {
            "reward": sum(w * r for w, r in zip(self.rubric.weights, rewards.values())),
            "metrics": rewards, "error": ended if ended == "error" else None,
            "is_completed": True, "is_truncated": ended == "prompt_too_long", "stop_condition": ended,
        }

    async def done(self, turns):
        return turns == 2
"""
PACKAGE = """
import verifiers as vf

try:
    from datasets import Dataset
    table = Dataset.from_list
except ImportError:
    table = list


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **settings):
        return [{"role": "user", "content": "Sure?"}]


def right(completion, answer, **settings) -> float:
    last = [m["content"] for m in completion if m["role"] == "assistant"][-1]
    if "break" in last:
        raise KeyError("broken")
    return float(last.endswith(answer))


def load_environment(largest: int = 30, own_split: bool = False):
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {n} + {n}?"}], "answer": str(2 * n)} for n in range(largest)
    ]
    rubric = vf.Rubric(funcs=[right], weights=[2.0])
    more = {"eval_dataset": table(rows[:5])} if own_split else {}
    if hasattr(vf, "SingleTurnEnv"):
        more["max_turns"] = 2
    return Twice(dataset=table(rows), rubric=rubric, **more)
"""
Make = Callable[..., VerifiersEnvironment]


@pytest.fixture(params=["stand-in", "real"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes the environment, in an interpreter with the stand-in or with the library."""
    if request.param == "real" and REAL is None:
        pytest.skip("HPCRL_TEST_CLASSIC_VERIFIERS names no interpreter")
    library = tmp_path / "library"
    (library / "verifiers").mkdir(parents=True)
    (library / "verifiers/__init__.py").write_text(STAND_IN)
    (library / "verifiers-0.3.1.dist-info").mkdir()
    (library / "verifiers-0.3.1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: verifiers\nVersion: 0.3.1\n"
    )
    (tmp_path / "twice.py").write_text(PACKAGE)
    value: dict[str, Any] = {"name": "v", "kind": "verifiers", "path": str(tmp_path / "twice.py")}
    value["python"] = REAL if request.param == "real" else sys.executable
    if request.param != "real":
        value["environ"] = {"PYTHONPATH": str(library)}
    async with AsyncExitStack() as stack:

        def made(**changes: Any) -> VerifiersEnvironment:
            environment = VerifiersEnvironment(VerifiersEnv.model_validate({**value, **changes}))
            stack.callback(environment.close)
            return environment

        yield made


class Adder(NullPolicy):
    """Adds, and says one word in front of the sum."""

    def __init__(self, word: str = "It is") -> None:
        super().__init__()
        self.word, self.asked = word, []  # type: tuple[str, list[list[Message]]]

    async def _reply_to_all(self, messages: list[Message]) -> Reply:
        self.asked.append(messages)
        a, b = re.findall(r"What is (\d+) \+ (\d+)", str(messages[0]["content"]))[-1]
        return Reply(text=f"{self.word} {int(a) + int(b)}", finished=True)


async def test_a_rollout_of_two_turns(make: Make) -> None:
    environment = make()
    train, held_out = (
        {environment.prompt(split, i).messages[-1]["content"] for i in range(60)}
        for split in ("train", "heldout")  # type: ignore[misc]
    )
    assert len(train | held_out) == 30
    assert held_out
    assert not train & held_out
    policy = Adder()
    outcome = await environment.rollout(environment.prompt("train", 3), policy)
    assert outcome.reward == 2.0
    assert {"right": 1.0, "truncated": 0.0}.items() <= outcome.parts.items()
    assert [[m["role"] for m in messages] for messages in policy.asked] == [["user"], ["user", "assistant", "user"]]
    assert policy.asked[1][-1]["content"] == "Sure?"


async def test_a_rubric_that_raises_gives_no_reward(make: Make) -> None:
    """The library itself scores 0."""
    environment = make()
    with pytest.raises(VerifiersRolloutError, match="right: KeyError: 'broken'"):
        await environment.rollout(environment.prompt("train", 3), Adder("break"))


async def test_a_split_of_its_own(make: Make) -> None:
    environment = make(args={"own_split": True})
    assert environment.notes == ["5 training tasks are left out: held-out tasks ask the same"]
    assert environment.prompt("heldout", 6).messages[-1]["content"] == "What is 1 + 1?"
    assert environment.prompt("train", 0).messages[-1]["content"] == "What is 5 + 5?"


def test_settings_that_are_wrong(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"v\.args: .*unexpected keyword argument 'smallest'"):
        make(args={"smallest": 1})
    with pytest.raises(ConfigError, match=r"v\.agent: this is a setting of tasksets"):
        make(agent="player")


def test_a_taskset_needs_a_newer_library(make: Make, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("TASKS = []\n")
    with pytest.raises(
        ConfigError, match=r"v\.python: .*has verifiers 0\.\d.*no load_environment\n.*install verifiers 0\.4"
    ):
        make(path=str(tmp_path / "tasks.py"))
