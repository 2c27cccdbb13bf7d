"""Executes the program of a policy in a process of its own inside a sandbox (see `code_judge`, next to this file).

Python 3.8 reads this file.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any, Callable  # noqa: UP035

from hpcrl.rollouts.environments.rewards.code_values import decode_value, encode_value

_MAX_MESSAGE = 500


def serve_program(requests: int, answers: int) -> None:
    """Execute a program, and do with it what the judge asks, until that closes the descriptor of its requests."""
    handles: list[Any] = []
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    sys.argv[:] = ["solution.py"]

    def refer(value: Any) -> Any:
        handles.append(value)
        return ["h", len(handles) - 1]

    def run(texts: list[str], wanted: list[str]) -> Any:
        for text in texts:
            exec(compile(text, "solution.py", "exec"), vars(module))
        return [[name, encode_value(vars(module)[name], refer)] for name in wanted if name in vars(module)]

    def call(number: int, args: list[Any], named: dict[str, Any]) -> Any:
        values = [decode_value(each, handles.__getitem__) for each in args]
        result = handles[number](
            *values, **{name: decode_value(each, handles.__getitem__) for name, each in named.items()}
        )
        # what a function has changed in place is changed in the test, too
        changed = []
        for place, value in enumerate(values):
            if type(value) in (list, dict, set, bytearray):
                now = encode_value(value, refer)
                if now != args[place]:
                    changed.append([place, now])
        return [encode_value(result, refer), changed]

    operations: dict[str, Callable[..., Any]] = {
        "run": run,
        "call": call,
        "get": lambda number, name: encode_value(getattr(handles[number], name), refer),
        "set": lambda number, name, value: setattr(handles[number], name, decode_value(value, handles.__getitem__)),
        "item": lambda number, key: encode_value(handles[number][decode_value(key, handles.__getitem__)], refer),
        "len": lambda number: len(handles[number]),
        "iter": lambda number: encode_value(iter(handles[number]), refer),
        "next": lambda number: encode_value(next(handles[number]), refer),
        "str": lambda number: str(handles[number]),
        "repr": lambda number: repr(handles[number]),
    }
    with os.fdopen(requests, "rb") as stream, os.fdopen(answers, "wb") as out:
        for line in stream:
            operation, *args = json.loads(line)
            try:
                text = json.dumps(["v", operations[operation](*args)])
            except BaseException as error:  # noqa: BLE001 - foreign code, SystemExit as well
                text = json.dumps(["e", [each.__name__ for each in type(error).__mro__], _message_of(error)])
            out.write(text.encode() + b"\n")
            out.flush()


def _message_of(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_MESSAGE]
    except BaseException:  # noqa: BLE001
        return ""
