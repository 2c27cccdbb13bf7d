"""Tests of programs, as the columns of a row have them, and the program of a reply."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrl.config.rewards import CodeReward
from hpcrl.rollouts.environments.rewards.extraction import last_fenced_block

_FORMS = "assert lines, or mappings with input and output"


class CodeTestsError(ValueError):
    """Raised where columns of a row are no tests; the message is a sentence without its end."""


@dataclass(frozen=True, slots=True)
class CodeTests:
    """Tests of a program: assert lines, or pairs.

    Attributes
    ----------
    asserts:
        Texts in Python, each a test.
    pairs:
        Standard input and expected standard output of each test.
    entry_point:
        Name of the tested function; empty where it is not known.
    before, setup:
        Code that runs before and after the program.
    """

    asserts: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    entry_point: str = ""
    before: str = ""
    setup: str = ""


def read_code_tests(config: CodeReward, values: Mapping[str, Any]) -> CodeTests:
    """Return the tests of a row.

    Raises
    ------
    CodeTestsError
        Its columns are none.
    """
    column = config.tests
    found = values.get(column)
    if isinstance(found, str):
        found = _from_json(found)
    if found is None or found in ("", [], (), {}):
        raise CodeTestsError(f"column {column!r} has no tests")
    if isinstance(found, str) or (isinstance(found, list | tuple) and all(isinstance(each, str) for each in found)):
        return _asserts(config, values, [found] if isinstance(found, str) else list(found))
    if config.before is not None or config.setup is not None:
        raise CodeTestsError(f"column {column!r} has inputs and outputs, with which before and setup cannot be used")
    return CodeTests(pairs=tuple(_pairs(column, found)))


def program_of(reply: str, part: str) -> str:
    """Return the program of a reply: its last closed block between fences, or all of it; empty where there is none."""
    if part == "all":
        return reply
    return textwrap.dedent(last_fenced_block(reply)[0] or "")


def same_output(said: str, expected: str) -> bool:
    """Compare two outputs, but for blanks at the ends of lines and empty lines at the end."""
    return _lines(said) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _from_json(text: str) -> Any:
    """Return a list or a mapping that a text is the JSON of, and any other text as it is."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _asserts(config: CodeReward, values: Mapping[str, Any], tests: list[str]) -> CodeTests:
    entry_point = _text(values, config.entry_point).strip()
    if entry_point and not entry_point.isidentifier():
        raise CodeTestsError(f"column {config.entry_point!r} is not a name of Python")
    for number, test in enumerate(tests):
        tree = _parsed(test, f"test {number + 1} of column {config.tests!r}")
        defined = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        if "check" in defined and entry_point:
            tests[number] = f"{test}\ncheck({entry_point})\n"
        elif not any(isinstance(each, ast.Assert | ast.Call | ast.Raise) for each in ast.walk(tree)):
            raise CodeTestsError(f"test {number + 1} of column {config.tests!r} asserts nothing")
        elif "check" in defined and not any(isinstance(each, ast.Assert | ast.Expr) for each in tree.body):
            raise CodeTestsError(f"column {config.tests!r} defines check and does not call it: name entry_point")
    before, setup = _text(values, config.before), _text(values, config.setup)
    _parsed(before, f"column {config.before!r}")
    _parsed(setup, f"column {config.setup!r}")
    return CodeTests(asserts=tuple(tests), entry_point=entry_point, before=before, setup=setup)


def _parsed(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CodeTestsError(f"{where} is not Python: {error}") from None


def _text(values: Mapping[str, Any], column: str | None) -> str:
    """Return the text in a column that may be empty; a list of lines is a text, too."""
    if column is None:
        return ""
    if column not in values:
        raise CodeTestsError(f"column {column!r} does not exist")
    found = values[column]
    if isinstance(found, list | tuple) and all(isinstance(each, str) for each in found):
        return "\n".join(found)
    if found is not None and not isinstance(found, str):
        raise CodeTestsError(f"column {column!r} is not text")
    return found or ""


def _pairs(column: str, found: Any) -> list[tuple[str, str]]:
    """Return inputs and outputs of either form."""
    if isinstance(found, Mapping):
        if found.get("fn_name") is not None:
            what = "has inputs of a function, fn_name: write them as assert lines"
            raise CodeTestsError(f"column {column!r} {what}")
        inputs, outputs = found.get("inputs"), found.get("outputs")
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise CodeTestsError(f"column {column!r} has not as many inputs as outputs")
        if not inputs:
            raise CodeTestsError(f"column {column!r} has no tests")
        pairs = list(zip(inputs, outputs, strict=True))
    elif isinstance(found, list | tuple) and all(isinstance(each, Mapping) for each in found):
        if any(each.get("testtype") == "functional" for each in found):
            what = "has inputs of a function, testtype: write them as assert lines"
            raise CodeTestsError(f"column {column!r} {what}")
        pairs = [(each.get("input"), each.get("output")) for each in found]
    else:
        raise CodeTestsError(f"column {column!r} has neither {_FORMS}")
    return [(_stream(column, said), _stream(column, wanted)) for said, wanted in pairs]


def _stream(column: str, value: Any) -> str:
    """Return the text of a stream; some data sets have a list of its lines."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise CodeTestsError(f"column {column!r} has an input or an output that is not text")
    return value
