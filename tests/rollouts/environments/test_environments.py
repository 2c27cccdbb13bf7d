"""Environments and the sandbox, without engines."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.config.recipe import CalculatorEnv, LatencyConfig, WordsEnv
from hpcrl.errors import ConfigError
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.environments import Environment, Message, Reply
from hpcrl.rollouts.environments.calculator import CalculatorEnvironment
from hpcrl.rollouts.environments.latency import DelayedEnvironment
from hpcrl.rollouts.environments.sandbox import ProgramError, ProgramRunner
from hpcrl.rollouts.environments.words import WordsEnvironment, transform, word_list


class Script:
    """A policy that says what it is told to."""

    def __init__(self, *texts: str, seed: int = 0, finished: bool = True) -> None:
        self.texts, self.seed, self.finished = list(texts), seed, finished
        self.heard: list[Message] = []

    async def reply(self, messages: Sequence[Message]) -> Reply:
        self.heard += messages
        return Reply(text=self.texts.pop(0), finished=self.finished)


def words(**changes: Any) -> WordsEnvironment:
    return WordsEnvironment(WordsEnv(name="words", kind="words", **changes))


def calculator(**changes: Any) -> CalculatorEnvironment:
    return CalculatorEnvironment(CalculatorEnv(name="calculator", kind="calculator", **changes))


@pytest.mark.parametrize("environment", [words(), words(task="sort", max_letters=9), calculator()])
def test_prompts_are_stable_and_the_two_sets_are_disjoint(environment: Environment) -> None:
    train = [environment.prompt("train", i) for i in range(2000)]
    heldout = [environment.prompt("heldout", i) for i in range(200)]
    assert train == [environment.prompt("train", i) for i in range(2000)]
    assert not {p.messages[0]["content"] for p in train} & {p.messages[0]["content"] for p in heldout}
    assert len({p.messages[0]["content"] for p in heldout}) > 100


def test_the_word_list() -> None:
    assert len(word_list()) > 1500
    assert all(word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 9 for word in word_list())


def test_transform() -> None:
    assert [transform(task, "zebra") for task in ("reverse", "sort", "shift")] == ["arbez", "aberz", "afcsb"]


async def test_words_rewards() -> None:
    environment = words()
    prompt = environment.prompt("train", 0)
    word = prompt.data
    right = await environment.rollout(prompt, Script(word[::-1]))
    assert (right.reward, right.parts) == (1.0, {"exact": 1.0, "letters": 1.0})
    wrong = await environment.rollout(prompt, Script(word[::-1][:-1]))
    assert wrong.reward < 0.1
    assert 0 < wrong.parts["letters"] < 1
    assert (await environment.rollout(prompt, Script(""))).reward == 0.0


def test_no_words_of_that_length() -> None:
    with pytest.raises(ConfigError, match="no words of 20 to 30 letters"):
        words(min_letters=20, max_letters=30)


@pytest.mark.parametrize("environment", [words(), words(task="sort"), words(task="shift"), calculator()])
async def test_demonstrations_earn_what_they_show(environment: Environment) -> None:
    rng = random.Random(0)
    for index in range(40):
        prompt = environment.prompt("train", index)
        for correct in (True, False):
            said = environment.demonstration(prompt, correct=correct, rng=rng)
            assert tuple(said[: len(prompt.messages)]) == prompt.messages
            script = Script(*(message["content"] for message in said if message["role"] == "assistant"))
            outcome = await environment.rollout(prompt, script)
            assert outcome.reward == 1.0 if correct else outcome.reward < 0.15
            # what the tool says in a demonstration is what it says in a rollout
            assert [m for m in script.heard if m["role"] == "tool"] == [m for m in said if m["role"] == "tool"]
            assert sum(len(message["content"]) for message in said) < 60


async def test_calculator_turns() -> None:
    environment = calculator()
    prompt = environment.prompt("train", 0)
    value = str(prompt.data.value)
    assert (await environment.rollout(prompt, Script(f"answer {value}"))).parts["tool"] == 0.0
    assert (await environment.rollout(prompt, Script(value))).reward == 0.0
    broken = Script("run import os", f"answer {value}")
    outcome = await environment.rollout(prompt, broken)
    assert (outcome.reward, outcome.parts["tool_errors"]) == (1.0, 1.0)
    assert broken.heard[-1] == {"role": "tool", "content": "error"}
    endless = Script(*["run 1"] * 5)
    assert (await environment.rollout(prompt, endless)).reward == 0.0
    assert len(endless.texts) == 2  # max_turns is 3
    assert (await environment.rollout(prompt, Script("run 1", finished=False))).parts["tool"] == 0.0


def test_too_few_questions() -> None:
    with pytest.raises(ConfigError, match="max_operand"):
        calculator(max_operand=1)


# -- sandbox


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("47*83+5", "3906"),
        ("a=3; b=a*4\nb-1", "11"),
        ("a=b=2; a+b", "4"),
        ("-7//2", "-4"),
        ("2**10", "1024"),
        ("7/2", "3.5"),
        ("9**400", str(9**400)[:64]),
    ],
)
async def test_programs(program: str, value: str) -> None:
    assert await ProgramRunner(timeout_s=10.0).run(program) == value


@pytest.mark.parametrize(
    "program",
    [
        "",
        "x",
        "1/0",
        "1.5",
        "'a'*9",
        "True",
        "[1]",
        "f'{1}'",
        "print(1)",
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "().__class__",
        "lambda: 0",
        "import os",
        "while 1: pass",
        "a: int = 1",
        "a += 1",
        "[a for a in (1,)]",
        "9**9**9**9",
        "2**-1",
        "a=2;" + "a=a*a;" * 80 + "a",
        "(" * 400 + ")" * 400,
        "-" * 500 + "1)",
        "1" * 513,
        "é",
        "1\0",
        "a=" * 200,
    ],
)
async def test_hostile_texts_give_an_error(program: str) -> None:
    with pytest.raises(ProgramError):
        await ProgramRunner(timeout_s=10.0).run(program)


@pytest.mark.parametrize(
    "escape",
    [
        "open('/etc/passwd')",
        "open('/tmp/hpcrl-escape', 'w')",
        "import socket; socket.socket()",
        "import os; os.pipe()",
        "import os; os.environ['PATH']",
    ],
)
async def test_the_process_itself_can_do_nothing(escape: str, monkeypatch: Any) -> None:
    """Even if the language let it through: limits are set before the text is read."""
    from hpcrl.rollouts.environments import sandbox

    child = sandbox._CHILD.replace(
        "def run(text):", f"def run(text):\n    {escape}\n    return 'escaped'\n\ndef old(text):"
    )
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(ProgramError):
        await ProgramRunner(timeout_s=10.0).run("1")


async def test_a_program_that_hangs_is_killed(monkeypatch: Any) -> None:
    from hpcrl.rollouts.environments import sandbox

    monkeypatch.setattr(sandbox, "_CHILD", "import time; time.sleep(60)")
    started = time.monotonic()
    with pytest.raises(ProgramError, match=r"within 0\.3 s"):
        await ProgramRunner(timeout_s=0.3).run("1")
    assert time.monotonic() - started < 30.0


def children() -> set[int]:
    """Processes of this one now; other tests may have left helpers of their own."""
    return {process.pid for process in psutil.Process().children()}


async def test_a_cancelled_call_leaves_no_process(monkeypatch: Any) -> None:
    from hpcrl.rollouts.environments import sandbox

    monkeypatch.setattr(sandbox, "_CHILD", "import time; time.sleep(60)")
    before = children()
    call = asyncio.create_task(ProgramRunner(timeout_s=30.0).run("1"))
    async with asyncio.timeout(60.0):
        while not children() - before:
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(60.0):
        while children() - before:
            await asyncio.sleep(0.01)


async def test_few_programs_run_at_once() -> None:
    box = ProgramRunner(timeout_s=30.0, max_processes=2)
    before, most = children(), 0

    async def count() -> None:
        nonlocal most
        while True:
            most = max(most, len(children() - before))
            await asyncio.sleep(0.001)

    counter = asyncio.create_task(count())
    await asyncio.gather(*(box.run("1+1") for _ in range(20)))
    counter.cancel()
    assert 1 <= most <= 2


# -- latency, counters


async def test_latency_is_deterministic_and_has_a_tail(monkeypatch: Any) -> None:
    latency = LatencyConfig(median_s=0.01, tail_share=0.1, tail_factor=10.0)
    environment = DelayedEnvironment(words(), name="slow", latency=latency)
    waits = [environment.wait_s(seed) for seed in range(2000)]
    assert waits == [environment.wait_s(seed) for seed in range(2000)]
    assert sorted(waits)[1000] == pytest.approx(0.01, rel=0.2)
    assert sum(wait > 0.02 for wait in waits) / 2000 == pytest.approx(0.1, abs=0.03)
    seed = waits.index(max(waits))
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("hpcrl.rollouts.environments.latency.asyncio.sleep", sleep)
    await environment.rollout(environment.prompt("heldout", 0), Script("x", seed=seed))
    assert slept == []
    await environment.rollout(environment.prompt("train", 0), Script("x", seed=seed))
    assert slept == [waits[seed]]


def test_documented_counters_are_all_of_them() -> None:
    text = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    assert all(f"`{name}`" in text for name in Counters().as_dict())
