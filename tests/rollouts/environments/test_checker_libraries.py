"""Checkers that libraries do: mathematical expressions, and documents by a schema."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dataset_testing import OneReply, make_dataset, write_jsonl
from patience import patience

from hpcrl.config.rewards import JsonSchemaReward, MathReward
from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments.dataset.environment import DatasetEnvironment
from hpcrl.rollouts.environments.rewards.made import CheckerNotMadeError
from hpcrl.rollouts.environments.rewards.processes import CheckerError, CheckerTimeoutError
from hpcrl.rollouts.environments.rewards.slow import make_check

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@contextlib.contextmanager
def one_question(path: Path, answer: Any, reward: dict[str, Any]) -> Iterator[DatasetEnvironment]:
    """An environment of one question."""
    train = write_jsonl(path / "q.jsonl", [{"prompt": "a", "answer": answer}])
    held_out = write_jsonl(path / "h.jsonl", [{"prompt": "b", "answer": answer}])
    environment = make_dataset(train, reward, held_out_path=str(held_out))
    try:
        yield environment
    finally:
        environment.close()


async def judge(environment: DatasetEnvironment, reply: str) -> float:
    return (await environment.rollout(environment.prompt("train", 0), OneReply(reply))).reward


@pytest.mark.parametrize(
    ("answer", "replies"),
    [
        ("42", {"It is 42.": 1, r"\boxed{42}": 1, "$42$": 1, "": 0, "I don't know": 0, r"\boxed{43}": 0}),
        (r"\frac{1}{2}", {r"\boxed{0.5}": 1, r"$\frac{2}{4}$": 1, "1/2": 1, r"\boxed{2}": 0, r"\boxed{\foo}": 0}),
        ("x^2+2x+1", {"$(x+1)^2$": 1, r"\boxed{x^2+1+2x}": 1, "$(x-1)^2$": 0, r"\boxed{\frac{1}{}": 0}),
        (r"$\{1, 2\}$", {r"\boxed{\{2,1\}}": 1, r"\boxed{\{2\}}": 0, r"\boxed{x>3}": 0}),
        (r"so \boxed{\sqrt{2}}", {"$1.414214$": 1, "$1.42$": 0, r"$\frac{1}{0}$": 0}),
    ],
)
async def test_expressions(tmp_path: Path, answer: str, replies: dict[str, float]) -> None:
    with one_question(tmp_path, answer, {"kind": "math", "timeout_s": 30.0 * patience()}) as environment:
        assert {reply: await judge(environment, reply) for reply in replies} == replies


@pytest.mark.parametrize(
    ("answer", "replies"),
    [
        (r"2\sqrt{3}", {r"\boxed{2\sqrt{3}}": 1, r"\boxed{\sqrt{12}}": 1, r"\boxed{2}": 0, r"2\sqrt{3}": 0}),
        (r"\frac{\pi}{2}", {r"\boxed{\frac{\pi}{2}}": 1, r"\boxed{\pi/2}": 1, r"\boxed{\pi}": 0}),
        (r"\frac{1}{2}", {r"\boxed{\dfrac12}": 1, r"\boxed{\frac{1}{2}}": 1, r"\boxed{50\%}": 1, r"\boxed{12}": 0}),
        ("x^2+1", {r"\boxed{1+x^2}": 1, r"\boxed{x^2}": 0}),
        (r"[0,\infty)", {r"\boxed{[0,\infty)}": 1, r"\boxed{(0,\infty)}": 0}),
        ("(1,2)", {r"\boxed{(1, 2)}": 1, r"\boxed{(2,1)}": 0}),
        (
            "5",
            {
                r"\boxed{5 \text{ or } 7}": 0,
                r"\boxed{5\text{ km}}": 1,
                r"\boxed{5 dollars}": 1,
                r"\boxed{-5 dollars}": 0,
            },
        ),
        (r"\text{(A)}", {r"\boxed{A}": 1, r"\boxed{B}": 0}),
    ],
)
def test_a_marked_expression_is_read_as_the_answer_is(answer: str, replies: dict[str, float]) -> None:
    check = make_check(MathReward(kind="math", extract="boxed"))
    assert {reply: check.score(f"So {reply}.", answer, {}) for reply in replies} == replies
    check = make_check(MathReward(kind="math", extract="answer_tag"))
    assert check.score(f"So <answer>{answer}</answer>", answer, {}) == 1


@pytest.mark.parametrize("part", ["all", "boxed"])
def test_thousands_are_no_product(part: Any) -> None:
    check = make_check(MathReward(kind="math", extract=part))
    for answer in ("1000", r"1\,000", "1 000", "1{,}000", "$1\N{NARROW NO-BREAK SPACE}000$"):
        for reply in (r"\boxed{1\,000}", r"\boxed{1 000}", r"\boxed {1000}", r"\fbox{1{,}000}"):
            assert check.score(f"So {reply}.", answer, {}) == 1, (answer, reply)
            assert check.score(f"So {reply}.", "0", {}) == 0, reply
    assert check.score(r"\boxed{x\,y}", "xy", {}) == 1


async def test_an_endless_expression_fails_its_rollout(tmp_path: Path) -> None:
    with one_question(tmp_path, "42", {"kind": "math", "timeout_s": 30.0 * patience()}) as environment:
        assert await judge(environment, "$42$") == 1
    with one_question(tmp_path, "42", {"kind": "math", "timeout_s": 5.0}) as environment:
        with pytest.raises(CheckerError) as caught:
            await judge(environment, r"\boxed{9^{9^{9^{9}}}!}")
        # the deadline, or the limit of memory, whatever comes first
        assert isinstance(caught.value, CheckerTimeoutError) or "MemoryError" in str(caught.value)


def test_an_answer_that_is_not_an_expression_is_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught, one_question(tmp_path, r"\frac{1}{", {"kind": "math"}):
        pass
    assert "environments.asked.rewards.0: an answer of the file is not an expression" in str(caught.value)
    assert r"\frac{1}{" in str(caught.value)


def test_what_comparing_raises_is_raised_and_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    check: Any = make_check(MathReward(kind="math"))

    def verify(gold: Any, target: Any, **settings: Any) -> bool:
        if isinstance(target, str):
            raise RecursionError("deep")
        return bool(gold == target)

    monkeypatch.setattr(check._library, "verify", verify)
    assert check.score("$42$", "42", {}) == 1
    with pytest.raises(RecursionError):
        check.score("$43$", "42", {})


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"name": "Ada", "age": 36}', 1),
        (' {"age": 36,\n "name": "Ada"}\n', 1),
        ('{"name": "Ada", "age": -1}', 0),
        ('{"name": "Ada", "age": 36.5}', 0),
        ('{"name": "Ada"}', 0),
        ('{"name": "Ada", "age": 36, "more": 1}', 0),
        ('{"name": "Ada", "age": NaN}', 0),
        ('Here: {"name": "Ada", "age": 36}', 0),
        ("", 0),
        ("[" * 100_000, 0),
        ('{"name": "Ada", "age": 1' + "0" * 10_000 + "}", 0),
    ],
)
def test_documents(reply: str, score: float) -> None:
    check = make_check(JsonSchemaReward(kind="json_schema", definition=PERSON))
    assert check.score(reply, "", {}) == score


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('```json\n{"a": 1}\n```', 1),
        ('First\n```\n[]\n```\nthen\n```json\n{"a": 1}\n```\nDone.', 1),
        ('```{"a": 1}```', 1),
        ('```json\n{"a": 1}\n```\nThe key ```a``` is set.', 1),
        ('```json\n[]\n```\nthen\n```json\n{"a": 1}```', 1),
        ('```json\n{"a": 1}', 0),
        ('{"a": 1}', 0),
    ],
)
def test_the_last_fenced_block(reply: str, score: float) -> None:
    check = make_check(JsonSchemaReward(kind="json_schema", definition={"type": "object"}, fenced=True))
    assert check.score(reply, "", {}) == score


async def test_a_schema_of_the_row(tmp_path: Path) -> None:
    with one_question(tmp_path, json.dumps(PERSON), {"kind": "json_schema"}) as environment:
        assert await judge(environment, '{"name": "Ada", "age": 36}') == 1
        assert await judge(environment, "[]") == 0
    for answer, what in (("{", "is not JSON"), ('{"type": "person"}', "is not a JSON Schema")):
        with pytest.raises(ConfigError, match=what), one_question(tmp_path, answer, {"kind": "json_schema"}):
            pass


async def test_schemas_that_are_none_and_references_to_elsewhere(tmp_path: Path) -> None:
    bad = {"kind": "json_schema", "definition": {"type": "person"}}
    with (
        pytest.raises(ConfigError, match=r"rewards\.0: definition is not a JSON Schema"),
        one_question(tmp_path, "", bad),
    ):
        pass
    away = {"kind": "json_schema", "definition": {"$ref": "http://127.0.0.1:9/schema.json"}}
    with one_question(tmp_path, "", away) as environment, pytest.raises(CheckerError, match="Unresolvable"):
        await judge(environment, "{}")


@pytest.mark.parametrize(("kind", "module"), [("math", "math_verify"), ("json_schema", "jsonschema")])
def test_a_library_that_is_missing_is_named(kind: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = MathReward(kind="math") if kind == "math" else JsonSchemaReward(kind="json_schema")
    with pytest.raises(CheckerNotMadeError) as caught:
        make_check(config)
    assert f"'{module}'" in caught.value.what
    assert "[rewards]'" in caught.value.hint
