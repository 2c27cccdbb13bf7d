"""Checkers of replies: what they count as right, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from dataset_testing import OneReply, make_dataset, write_jsonl
from patience import patience, wait_for

from hpcrl.config.rewards import RegexReward
from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments.base import Outcome, Reply
from hpcrl.rollouts.environments.dataset.environment import DatasetEnvironment
from hpcrl.rollouts.environments.outcomes import OutcomeError
from hpcrl.rollouts.environments.rewards.extraction import extract
from hpcrl.rollouts.environments.rewards.judge import Judge
from hpcrl.rollouts.environments.rewards.numbers import not_one_number, number_of
from hpcrl.rollouts.environments.rewards.processes import CheckerError, CheckerTimeoutError


class Judged:
    """An environment of one question."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = contextlib.ExitStack()

    def make(self, answer: str, *rewards: dict[str, Any], **more: Any) -> DatasetEnvironment:
        rows = [{"prompt": f"a {i}", "answer": answer, "level": 1, **more} for i in range(2)]
        train = write_jsonl(self._path / "q.jsonl", rows[:1])
        held_out = write_jsonl(self._path / "h.jsonl", rows[1:])
        environment = make_dataset(train, *rewards, held_out_path=str(held_out))
        self._stack.callback(environment.close)
        return environment

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Judged]:
    found = Judged(tmp_path)
    yield found
    found.close()


async def judge(environment: DatasetEnvironment, reply: str, **more: Any) -> Outcome:
    async with asyncio.timeout(60.0 * patience()):
        return await environment.rollout(environment.prompt("train", 0), OneReply(reply, **more))


@pytest.mark.parametrize(
    ("part", "text", "found"),
    [
        ("all", " a\nb ", "a\nb"),
        ("all", " \n", None),
        ("last_line", "a\nthe end \n\n", "the end"),
        ("last_number", "3 of 4,000.5 m", "4,000.5"),
        ("last_number", "none", None),
        ("boxed", r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} and \boxed{2", "1"),
        ("boxed", r"\boxed{a\}b} }", r"a\}b"),
        ("boxed", r"} \boxed{7}", "7"),
        ("boxed", r"\boxed{}", None),
        ("boxed", r"\boxed {5}", "5"),
        ("boxed", r"$\boxed 5$", "5"),
        ("boxed", r"\boxed -1,200.", "-1,200"),
        ("boxed", r"\boxed{4} by \fbox{5}", "5"),
        ("boxed", r"\boxed{4}, in \boxed notation", "4"),
        ("boxed", r"\boxedsomething{4}", None),
        ("boxed", "7", None),
        ("hashes", "1+1\n#### 2\n", "2"),
        ("hashes", "#### 1 #### 2 \nmore", "2"),
        ("hashes", "2", None),
        ("answer_tag", "<answer>1</answer> <answer> 2 </answer>", "2"),
        ("answer_tag", "<answer>1", None),
        ("answer_tag", "1</answer>", None),
    ],
)
def test_extraction(part: Any, text: str, found: str | None) -> None:
    assert extract(text, part) == found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("72.", "72"),
        ("It costs $1,234.50!", "1234.50"),
        ("1,234,567", "1234567"),
        ("1,2", "2"),
        ("between 3-5", "5"),
        ("x = -5", "-5"),
        ("= - 5", "-5"),
        ("\N{MINUS SIGN}5", "-5"),
        ("-$5", "-5"),
        ("50%", "50"),
        ("3/4", "0.75"),
        (r"\frac{3}{4}", "0.75"),
        (r"-\dfrac{3}{4}", "-0.75"),
        ("1e-3", "0.001"),
        (".5", "0.5"),
        ("1\N{VULGAR FRACTION ONE HALF}", "1.5"),
        (r"1\frac{1}{2}", "1.5"),
        (r"$1\frac{1}{2}$", "1.5"),
        (r"-3\frac34", "-3.75"),
        ("- $3 3/4", "-3.75"),
        ("The answer:\n- 42", "42"),
        ("Both:\n\n  - 7\n  - $8", "8"),
        ("10 - 20", "20"),
        ("a = 7\n-3", "-3"),
        ("Question 2\n1/2", "0.5"),
        ("takes 12 1/2 hours", "12.5"),
        ("of 10 20/5", "4"),
        (r"\frac12", "0.5"),
        (r"\frac{1}4", "0.25"),
        ("12 cm\N{SUPERSCRIPT TWO}", "12"),
        ("12 cm^2", "12"),
        (r"12 \text{ m}^{2}", "12"),
        ("12 m3", "12"),
        (r"6.5 \times 10^{3}", "6500"),
        ("6 \N{MULTIPLICATION SIGN} 10\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT THREE}", "0.006"),
        ("10^6", "1000000"),
        ("1\N{NARROW NO-BREAK SPACE}234\N{NO-BREAK SPACE}567", "1234567"),
        ("1'234", "1234"),
        ("in 2024 1,234", "1234"),
        ("1{,}000", "1000"),
        (r"1\,000", "1000"),
        ("1 234 567", "1234567"),
        ("in 2024 300", "300"),
        ("\N{FULLWIDTH DIGIT SEVEN}", "7"),
        ("1/0", None),
        ("9" * 5000, None),
        ("1e99999", "99999"),
        ("", None),
        ("nan inf", None),
    ],
)
def test_numbers(text: str, number: str | None) -> None:
    found = number_of(text)
    assert found is None if number is None else found is not None and float(found) == float(number)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (r"2\sqrt{3}", "more than one number"),
        ("2^{10}", "more than one number"),
        ("12:30", "more than one number"),
        ("1.234,50", "more than one number"),
        ("1.234.567", "more than one number"),
        ("7 dollars and 50 cents", "more than one number"),
        (r"\frac{\pi}{2}", r"\frac"),
        (r"\sqrt{3}", r"\sqrt"),
        (r"5\pi", r"\pi"),
        ("{2}^{3}", "expression"),
        ("2e^{3}", "expression"),
        ("x^2+1", "expression"),
        ("3x", "expression"),
        ("sqrt(5)", "expression"),
    ],
)
def test_more_than_one_number_is_refused(text: str, what: str) -> None:
    assert what in not_one_number(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "5",
            "-5",
            r"\$5",
            r"50\%",
            "x = 5",
            r"$x=5$",
            r"90^\circ",
            r"12 \text{ m}^{2}",
            "12 cm^2",
            "12 m3",
            "5 m/s^2",
        ),
        *(
            r"1\frac{3}{4}",
            "1 3/4",
            r"6.5 \times 10^{3}",
            "10^{-3}",
            "1e-3",
            "1,234.50",
            r"1\,000",
            "1 000",
            "5 dollars.",
        ),
    ],
)
def test_one_number_and_words_are_an_answer(text: str) -> None:
    assert not_one_number(text) == ""


@pytest.mark.parametrize(
    ("config", "answer", "reply", "score"),
    [
        ({}, "Paris", " Paris\n", 1),
        ({}, "New  York", "New\nYork", 1),
        ({}, "Paris", "paris", 0),
        ({}, "Paris", "Paris.", 0),
        ({}, "Paris", "", 0),
        ({"collapse_whitespace": False}, "a b", "a  b", 0),
        ({"ignore_case": True}, "Straße", "STRASSE", 1),
        ({"ignore_punctuation": True}, "it's", "its!", 1),
        ({}, "10", "\N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT ZERO}", 1),
        ({"unicode": False}, "10", "\N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT ZERO}", 0),
        ({"extract": "last_line"}, "yes", "I think\nyes", 1),
        ({"extract": "boxed"}, "yes", "yes", 0),
        ({"extract": "last_line", "extract_answer": "hashes"}, "because\n#### yes", "so\nyes", 1),
    ],
)
async def test_exact(judged: Judged, config: dict[str, Any], answer: str, reply: str, score: float) -> None:
    assert (await judge(judged.make(answer, {"kind": "exact", **config}), reply)).reward == score


@pytest.mark.parametrize(
    ("config", "answer", "reply", "score"),
    [
        ({}, "12+12\n#### 24", "She has 24 apples.", 1),
        ({}, "#### 1,024", "1024.00", 1),
        ({}, "#### 24", "24 or 25", 0),
        ({}, "#### 24", "many", 0),
        ({}, "0.5", "1/2", 1),
        ({}, "0.333", "1/3", 0),
        ({"absolute_tolerance": 0.001}, "0.333", "1/3", 1),
        ({"relative_tolerance": 0.01}, "1000", "1009", 1),
        ({"relative_tolerance": 0.01}, "1000", "1011", 0),
        ({"relative_tolerance": 0.01}, "-1000", "-991", 1),
        ({"extract": "boxed"}, "24", "24 is \\boxed{25}", 0),
        ({"extract": "boxed"}, "24", "25 is \\boxed{24}", 1),
        ({"extract": "boxed"}, "24", "24", 0),
        ({}, "24", "9" * 100_000, 0),
    ],
)
async def test_numeric(judged: Judged, config: dict[str, Any], answer: str, reply: str, score: float) -> None:
    assert (await judge(judged.make(answer, {"kind": "numeric", **config}), reply)).reward == score


async def test_a_pattern_matches_somewhere_and_a_format_the_whole(judged: Judged) -> None:
    environment = judged.make(
        "x+y",
        {"kind": "regex", "pattern": "(?m)^ab?$"},
        {"kind": "regex", "name": "of_row", "ignore_case": True},
        {"kind": "format", "pattern": "<think>.*</think>.*", "weight": 0.5},
    )
    outcome = await judge(environment, "<think>\nab\nXXY\n</think> 7\n")
    assert outcome.reward == 2.5
    assert outcome.parts == {"regex": 1, "of_row": 1, "format": 1, "unfinished": 0}
    outcome = await judge(environment, "so <think>a</think> abc xy", finished=False)
    assert outcome.parts == {"regex": 0, "of_row": 1, "format": 0, "unfinished": 1}


async def test_a_format_that_is_required(judged: Judged) -> None:
    rewards = (
        {"kind": "exact", "extract": "answer_tag", "weight": 2.0},
        {"kind": "format", "pattern": "<answer>.*</answer>", "weight": 0.25, "required": True},
        {"kind": "length", "limit_characters": 30, "penalty": 0.5},
    )
    environment = judged.make("7", *rewards)
    assert (await judge(environment, "<answer>7</answer>")).reward == 2.25
    loose = await judge(environment, "well, it is <answer>7</answer>")
    assert (loose.reward, loose.parts["exact"]) == (0.0, 1.0)
    assert (await judge(environment, "well, I think that it is <answer>7</answer>")).reward == -0.5


async def test_penalties_rise_with_the_length(judged: Judged) -> None:
    exact = {"kind": "exact", "extract": "last_line"}
    tokens = {"kind": "length", "name": "tokens", "limit_tokens": 10, "rise": 4, "penalty": 0.5}
    environment = judged.make("7", exact, tokens, {"kind": "length", "limit_characters": 5, "penalty": 0.1})
    for count, penalty in ((10, 0.0), (11, -0.125), (14, -0.5), (400, -0.5), (None, 0.0)):
        outcome = await judge(environment, "7", tokens=count)
        assert outcome.reward == 1 + penalty
        assert outcome.parts["tokens"] == penalty
    assert (await judge(environment, "so is\n7")).parts["length"] == -0.1


async def test_functions_get_the_row_and_arguments(judged: Judged) -> None:
    shared = {"kind": "function", "function": "my_rewards:shared_words", "name": "words"}
    slowly = {"kind": "function", "function": "my_rewards:slowly"}
    environment = judged.make("red blue", shared, slowly, {**shared, "name": "more", "args": {"bonus": 0.25}})
    outcome = await judge(environment, "a red house")
    assert outcome.parts == {"words": 0.5, "function": 0.5, "more": 0.75, "unfinished": 0}


async def test_what_a_function_does_wrong_fails_the_rollout_and_is_never_a_reward(judged: Judged) -> None:
    environment = judged.make("", {"kind": "function", "function": "my_rewards:obedient", "highest": 1.0})
    for order, wrong in (("nan", "nan"), ("none", "None"), ("text", "not a number"), ("two", "not from 0 to 1")):
        with pytest.raises(OutcomeError, match=f"part 'function' of the reward: .*{wrong}"):
            await judge(environment, f"give {order}")
    with pytest.raises(CheckerError, match=r"ZeroDivisionError: no tests were found at .*my_rewards\.py:\d+ in obed"):
        await judge(environment, "raise")
    with pytest.raises(CheckerError, match="SystemExit: 3"):
        await judge(environment, "exit")
    with pytest.raises(CheckerError, match="ended with exit code 3"):
        await judge(environment, "die")
    assert (await judge(environment, "give half")).reward == 0.5
    assert (await judge(environment, "give true")).reward == 1.0


async def test_a_checker_that_hangs_is_ended_with_what_it_started(judged: Judged, tmp_path: Path) -> None:
    function = {"kind": "function", "function": "my_rewards:obedient", "timeout_s": 4.0 * patience()}
    environment = judged.make("", function)
    with pytest.raises(CheckerTimeoutError, match="no score within timeout_s"):
        await judge(environment, f"hang {tmp_path / 'child'}")
    child = int((tmp_path / "child").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(10 * patience())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert (await judge(environment, "give half")).reward == 0.5


async def test_an_endless_pattern_fails_its_rollout(judged: Judged) -> None:
    environment = judged.make("", {"kind": "regex", "pattern": "(a+)+b", "timeout_s": 3.0})
    with pytest.raises(CheckerTimeoutError):
        await judge(environment, "a" * 60)
    assert (await judge(environment, "ab")).reward == 1.0


async def test_processes_are_reused_and_a_dead_one_is_not_asked(judged: Judged) -> None:
    function = {"kind": "function", "function": "my_rewards:obedient", "highest": 1e9}
    environment = judged.make("", function)
    first = (await judge(environment, "pid")).reward
    assert (await judge(environment, "pid")).reward == first
    process = psutil.Process(int(first))
    process.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE, 60.0, "the end of the process", every_s=0.01)
    assert (await judge(environment, "pid")).reward != first


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("nowhere.at.all:score", "module 'nowhere.at.all' cannot be imported"),
        ("my_rewards:scores", "'my_rewards' has no function 'scores'\n    hint: it has "),
        ("my_rewards:NUMBER", "has no function 'NUMBER'"),
    ],
)
def test_a_function_that_is_not_there(judged: Judged, function: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        judged.make("4", {"kind": "exact"}, {"kind": "function", "function": function})
    assert "environments.asked.rewards.1" in str(caught.value)
    assert what in str(caught.value)


async def test_an_answer_that_fails_leaves_the_others() -> None:
    """Of several right answers one is enough, whatever the checker does with another."""
    judge = Judge("words", [RegexReward(kind="regex")], processes=1)
    try:
        right = await judge.judge(Reply("abc", finished=True), "(", {}, ["abc"])
        assert right.reward == 1.0
        with pytest.raises(CheckerError, match=r"part 'regex' of the reward: .*unterminated"):
            await judge.judge(Reply("xyz", finished=True), "(", {}, ["abc"])
    finally:
        judge.close()
