"""Checker of tool calls: compares those of a reply with those of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hpcrl.config.rewards import ToolCallReward
from hpcrl.rollouts.environments.base import Reply
from hpcrl.rollouts.environments.dataset.row_messages import decoded_arguments

_FORM: Final = '{"name": "...", "arguments": {...}}'
_Call = tuple[str, Mapping[str, Any]]


class ToolCallCheck:
    """Compares names and arguments of calls; no tool is run."""

    def __init__(self, config: ToolCallReward) -> None:
        self._config = config

    def score(self, reply: Reply, answer: str) -> float:
        wanted = read_calls(answer)
        if isinstance(wanted, str):
            return 0.0
        if not wanted:
            # a reply that was cut may have called a tool a moment later
            return float(not reply.calls and reply.finished)
        # a call that is not ok has no place among those that are wanted, and is one too many
        said = [(call.name, call.arguments) if call.status == "ok" else None for call in reply.calls]
        matched = _in_order(said, wanted) if self._config.ordered else _in_any_order(said, wanted)
        most = max(len(said), len(wanted))
        return matched / most if self._config.score == "share" else float(matched == most)

    def answer_problem(self, answer: str) -> str:
        calls = read_calls(answer)
        return calls if isinstance(calls, str) else ""


def read_calls(answer: str) -> list[tuple[str, Mapping[str, Any]]] | str:
    """Return the calls of an answer; where it has none that can be read: why, as the end of a sentence."""
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return f"is no JSON of a call or of a list of calls, {_FORM}"
    calls: list[_Call] = []
    for each in found if isinstance(found, list) else [found]:
        call = each.get("function", each) if isinstance(each, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return f"has a call that is not {_FORM}"
        arguments = decoded_arguments(call.get("arguments"))
        if arguments is None:
            return f"has a call of {call['name']!r} whose arguments are no JSON object"
        calls.append((call["name"], arguments))
    return calls


def _in_order(said: list[_Call | None], wanted: list[_Call]) -> int:
    return sum(_is_same_call(*both) for both in zip(said, wanted, strict=False))


def _in_any_order(said: list[_Call | None], wanted: list[_Call]) -> int:
    """Return how many calls have a partner; calls that are equal to one are equal to each other."""
    left = list(wanted)
    for call in said:
        partner = next((number for number, each in enumerate(left) if _is_same_call(call, each)), None)
        if partner is not None:
            del left[partner]
    return len(wanted) - len(left)


def _is_same_call(said: _Call | None, wanted: _Call) -> bool:
    return said is not None and said[0] == wanted[0] and _is_same(said[1], wanted[1])


def _is_same(said: Any, wanted: Any) -> bool:
    """Return whether two JSON values are equal: 1 is 1.0, and no truth value. A key without a value is no key."""
    if isinstance(wanted, Mapping):
        # a table has each key in each row, with null where a row has none
        keys = _keys_with_values(wanted)
        return (
            isinstance(said, Mapping)
            and _keys_with_values(said) == keys
            and all(_is_same(said[key], wanted[key]) for key in keys)
        )
    if isinstance(wanted, list):
        return (
            isinstance(said, list | tuple)
            and len(said) == len(wanted)
            and all(_is_same(*both) for both in zip(said, wanted, strict=True))
        )
    return isinstance(said, bool) == isinstance(wanted, bool) and type(said) in _SCALARS and bool(said == wanted)


def _keys_with_values(given: Mapping[str, Any]) -> set[str]:
    return {key for key, value in given.items() if value is not None}


_SCALARS: Final = (bool, int, float, str, type(None))
