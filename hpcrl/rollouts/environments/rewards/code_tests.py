"""Tests of programs, as the columns of a row have them, and the program of a reply."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.config.rewards import CodeReward
from hpcrl.rollouts.environments.rewards.code_cases import (
    CodeCall,
    CodeCases,
    CodeTestsError,
    checked_function,
    json_of,
    read_cases,
)
from hpcrl.rollouts.environments.rewards.extraction import last_fenced_block
from hpcrl.rollouts.environments.rewards.packed_tests import UnpackError, is_packed, unpacked_text

_EMPTY: tuple[Any, ...] = (None, "", [], (), {})


@dataclass(frozen=True, slots=True)
class CodeTests:
    """Tests of a program: assert lines, or pairs and calls.

    Attributes
    ----------
    asserts:
        Texts in Python, each a test.
    pairs:
        Standard input and expected standard output of each test.
    calls:
        Tests that call the function ``entry_point``.
    entry_point:
        Name of the tested function; empty where it is not known.
    before, setup:
        Code that runs before and after the program.
    """

    asserts: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    calls: tuple[CodeCall, ...] = ()
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
    columns = (config.tests,) if isinstance(config.tests, str) else config.tests
    entry_point = _entry_point(values, config.entry_point)
    asserts: list[str] = []
    cases: list[CodeCases] = []
    for column in columns:
        found = _tests_of(column, values)
        if found in _EMPTY:
            continue
        if isinstance(found, str) or (isinstance(found, list | tuple) and all(isinstance(each, str) for each in found)):
            asserts += _asserts(column, entry_point, [found] if isinstance(found, str) else list(found))
        else:
            cases.append(read_cases(column, found, entry_point))
    shown = " and ".join(repr(column) for column in columns)
    shown = f"column{'s' if len(columns) > 1 else ''} {shown}"
    if not asserts and not cases:
        raise CodeTestsError(f"{shown} {'have' if len(columns) > 1 else 'has'} no tests")
    if asserts and cases:
        raise CodeTestsError(f"{shown} have assert lines, and inputs and outputs as well")
    before, setup = _code(values, config.before), _code(values, config.setup)
    if asserts:
        return CodeTests(asserts=tuple(asserts), entry_point=entry_point, before=before, setup=setup)
    return _joined(shown, cases, before, setup)


def _joined(shown: str, cases: list[CodeCases], before: str, setup: str) -> CodeTests:
    """Return the tests of all columns with inputs and outputs."""
    pairs = tuple(pair for each in cases for pair in each.pairs)
    calls = tuple(call for each in cases for call in each.calls)
    functions = sorted({each.function for each in cases if each.calls})
    if len(functions) > 1:
        raise CodeTestsError(f"{shown} name two functions, {functions[0]} and {functions[1]}")
    if pairs and (before or setup):
        raise CodeTestsError(f"{shown}: with inputs and outputs of programs, before and setup cannot be used")
    return CodeTests(
        pairs=pairs, calls=calls, entry_point=functions[0] if functions else "", before=before, setup=setup
    )


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


def _tests_of(column: str, values: Mapping[str, Any]) -> Any:
    """Return what a column has, read from JSON and unpacked where it is either."""
    if column not in values:
        raise CodeTestsError(f"column {column!r} does not exist")
    found = values[column]
    if not isinstance(found, str):
        return found
    if is_packed(found):
        try:
            return json_of(unpacked_text(found))
        except UnpackError as error:
            raise CodeTestsError(f"column {column!r} {error}") from None
        except (ValueError, RecursionError) as error:
            raise CodeTestsError(f"column {column!r} is not JSON when it is unpacked: {error}") from None
    return _from_json(found)


def _from_json(text: str) -> Any:
    """Return a list or a mapping that a text is the JSON of, and any other text as it is."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        return json_of(text)
    except (ValueError, RecursionError):
        return text


def _entry_point(values: Mapping[str, Any], column: str | None) -> str:
    """Return the name of the tested function: of the column itself, or ``func_name`` of the mapping that it has."""
    if column is None:
        return ""
    found = values.get(column)
    if isinstance(found, str):
        found = _from_json(found)
    if isinstance(found, Mapping):
        name = found.get("func_name")
        return "" if name in (None, "") else checked_function(name, f"func_name of column {column!r}")
    name = _text(values, column).strip()
    return checked_function(name, f"column {column!r}") if name else ""


def _asserts(column: str, entry_point: str, tests: list[str]) -> list[str]:
    for number, test in enumerate(tests):
        where = f"test {number + 1} of column {column!r}"
        tree = _parsed(test, where)
        defined = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        if "check" in defined and entry_point:
            tests[number] = f"{test}\ncheck({entry_point})\n"
        elif not any(isinstance(each, ast.Assert | ast.Call | ast.Raise) for each in ast.walk(tree)):
            raise CodeTestsError(f"{where} asserts nothing")
        elif "check" in defined and not any(isinstance(each, ast.Assert | ast.Expr) for each in tree.body):
            raise CodeTestsError(f"column {column!r} defines check and does not call it: name entry_point")
    return tests


def _code(values: Mapping[str, Any], column: str | None) -> str:
    text = _text(values, column)
    _parsed(text, f"column {column!r}")
    return text


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
