"""Tests with inputs and outputs, in the forms that APPS and LiveCodeBench have, of whole programs and of functions."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from hpcrl.rollouts.environments.rewards.code_values import encode_value

_FORMS: Final = "assert lines, or mappings with input and output"
_STREAMS: Final = (None, "", "stdin", "stdin_stdout")
"""Values of ``testtype`` of a test whose input is the standard input."""
_MAX_DEPTH: Final = 100
"""Maximum depth of lists and mappings in a value: the judge's recursion reaches a few hundred."""
_MAX_DIGITS: Final = 4000
"""Digits of a number up to which Python itself reads it; APPS has longer ones."""
_WHOLE: Final = re.compile(r"0|-?[1-9][0-9]{0,17}")
_NESTED: Final = (list, tuple, dict)


class CodeTestsError(ValueError):
    """Raised where columns of a row are no tests; the message is a sentence without its end."""


@dataclass(frozen=True, slots=True)
class CodeCall:
    """A test that calls a function.

    Attributes
    ----------
    arguments, expected:
        A list and the value to return, each as JSON.
    encoded:
        Both are in the form of `hpcrl.rollouts.environments.rewards.code_values`.
    wrapped:
        The expected value is a list with one element, which is right, too.
    """

    arguments: str
    expected: str
    encoded: bool = False
    wrapped: bool = False


@dataclass(frozen=True, slots=True)
class CodeCases:
    """Tests with inputs and outputs.

    Attributes
    ----------
    pairs:
        Standard input and expected standard output of each test of the whole program.
    calls:
        Tests of a function.
    function:
        Its name; empty where there are no calls.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    calls: tuple[CodeCall, ...] = ()
    function: str = ""


def json_of(text: str) -> Any:
    """Return the value of a JSON text; numbers may have any number of digits.

    Raises
    ------
    ValueError, RecursionError
        It is not JSON, or nested too deeply.
    """
    return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int:
    # by way of Decimal, which has no limit, and takes linear time to read
    return int(digits) if len(digits) <= _MAX_DIGITS else int(Decimal(digits))


def read_cases(column: str, found: Any, function: str) -> CodeCases:
    """Return the tests of a column: a mapping with inputs and outputs, or mappings with input and output.

    Parameters
    ----------
    function:
        Name of the function where the column has none; may be empty.

    Raises
    ------
    CodeTestsError
        It has other values.
    """
    if isinstance(found, Mapping):
        inputs, outputs = found.get("inputs"), found.get("outputs")
        if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
            raise CodeTestsError(f"column {column!r} has not as many inputs as outputs")
        if not inputs:
            raise CodeTestsError(f"column {column!r} has no tests")
        if found.get("fn_name") in (None, ""):
            return CodeCases(pairs=tuple(_pairs(column, list(zip(inputs, outputs, strict=True)))))
        function = checked_function(found["fn_name"], f"fn_name of column {column!r}")
        return CodeCases(calls=tuple(_calls(column, inputs, outputs)), function=function)
    if not isinstance(found, list | tuple) or not all(isinstance(each, Mapping) for each in found):
        raise CodeTestsError(f"column {column!r} has neither {_FORMS}")
    return _listed(column, found, function)


def checked_function(name: Any, where: str) -> str:
    """Return the name of a function (`CodeTestsError` where it is none)."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
        raise CodeTestsError(f"{where} is not a name of Python")
    return name


def _listed(column: str, found: Sequence[Mapping[str, Any]], function: str) -> CodeCases:
    """Return tests of which each names its own kind."""
    pairs, calls = [], []
    for number, each in enumerate(found, 1):
        kind = each.get("testtype")
        if kind == "functional":
            calls.append(_json_call(f"test {number} of column {column!r}", each.get("input"), each.get("output")))
        elif kind in _STREAMS:
            pairs.append((each.get("input"), each.get("output")))
        else:
            raise CodeTestsError(f"test {number} of column {column!r} has a testtype other than stdin and functional")
    if calls and not function:
        what = f"column {column!r} has inputs of a function without a name"
        raise CodeTestsError(f"{what}: entry_point names the column that has it, as metadata of LiveCodeBench")
    return CodeCases(tuple(_pairs(column, pairs)), tuple(calls), function if calls else "")


def _calls(column: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[CodeCall]:
    """Return the calls of a mapping with ``fn_name``: arguments as lists, or text with the JSON of one on each line."""
    # one layer of list around each output is that of a file, unless some output of the row has none
    wrapped = all(isinstance(each, list | tuple) and len(each) == 1 for each in outputs)
    calls = []
    for number, (given, expected) in enumerate(zip(inputs, outputs, strict=True), 1):
        where = f"test {number} of column {column!r}"
        if isinstance(given, str):
            calls.append(_json_call(where, given, expected))
        elif isinstance(given, list | tuple):
            _check_depth(where, [given, expected])
            arguments = [_with_numbers(each) for each in given]
            calls.append(CodeCall(_encoded(where, arguments), _encoded(where, expected), True, wrapped))
        else:
            raise CodeTestsError(f"{where} has an input that is neither a list of arguments nor text")
    return calls


def _json_call(where: str, given: Any, expected: Any) -> CodeCall:
    """Return a call whose arguments are JSON, one a line, and whose result is JSON."""
    if not isinstance(given, str) or not isinstance(expected, str):
        raise CodeTestsError(f"{where} has an input or an output of a function that is not text with JSON")
    lines = [line for line in given.split("\n") if line.strip()]
    for name, text in (*(("input", line) for line in lines), ("output", expected)):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CodeTestsError(f"{where} has an {name} of a function that is not JSON: {error}") from None
        _check_depth(where, value)
    # the text itself is kept, which is faster than to write large values once more
    return CodeCall(f"[{','.join(lines)}]", expected)


def _encoded(where: str, value: Any) -> str:
    def refuse(each: Any) -> Any:
        raise CodeTestsError(f"{where} has a value of type {type(each).__name__}, which is not one of JSON")

    return json.dumps(encode_value(value, refuse))


def _with_numbers(argument: Any) -> Any:
    """Return a mapping whose keys are digits with numbers in their place: JSON could not write these."""
    if isinstance(argument, dict) and argument and all(_WHOLE.fullmatch(str(key)) for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def _check_depth(where: str, value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, _NESTED)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise CodeTestsError(f"{where} has lists in lists, deeper than {_MAX_DEPTH}")


def _pairs(column: str, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[str, str]]:
    return [(_stream(column, given), _stream(column, wanted)) for given, wanted in pairs]


def _stream(column: str, value: Any) -> str:
    """Return the text of a stream; some data sets have a list of its lines."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise CodeTestsError(f"column {column!r} has an input or an output that is not text")
    return value
