"""Parse a turn of the policy from its sampled token ids: text, thinking and tool calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.environments.base import CallStatus, Tool, ToolCall
from hpcrl.rollouts.environments.messages import MAX_LEVELS, is_nested_deeper
from hpcrl.rollouts.rendering.formats import ParseTurn

_MAX_RAW = 4096
"""Maximum characters of a call that are kept as they were sampled."""
_STATUSES = frozenset(get_args(CallStatus))


@dataclass(frozen=True, slots=True)
class Parsed:
    """Parsed turn of the policy.

    Attributes
    ----------
    text:
        Text outside of thinking and calls, without control tokens.
    thinking:
        Empty where there is none.
    calls:
        All calls in order, malformed ones included.
    """

    text: str
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()


class TurnParser:
    """Parses turns. The text of a policy is untrusted: it never raises, and is validated."""

    def __init__(self, tokenizer: ChatTokenizer, parse: ParseTurn | None) -> None:
        """Use ``parse``, the parser of a format; None: turns are text alone."""
        self._tokenizer, self._parse = tokenizer, parse

    def parse(
        self, token_ids: Sequence[int], *, said: Sequence[int] = (), tools: Sequence[Tool] = (), turn: int = 0
    ) -> Parsed:
        """Parse sampled tokens.

        Parameters
        ----------
        token_ids:
            Tokens of the turn, with the token that ended it.
        said:
            Tokens right before it, which may have begun the policy's thinking.
        tools:
            Existing tools; a call of another one is `unknown_tool`. None: every name is accepted.
        turn:
            Its number, for the identifiers of calls in formats that have none.
        """
        if self._parse is None:
            return Parsed(self._tokenizer.decode(token_ids))
        try:
            found = self._parse(list(token_ids), tools=list(tools) or None, prompt_ids=list(said))
            names = {tool["function"]["name"] for tool in tools}
            calls = tuple(_call(call, f"call_{turn}_{i}", names) for i, call in enumerate(found.tool_calls))
            return Parsed(str(found.content or ""), str(found.reasoning_content or ""), calls)
        except Exception as error:  # noqa: BLE001 - any text of a policy is possible, and its rollout continues
            raw = self._tokenizer.decode(token_ids, skip_special_tokens=False)[:_MAX_RAW]
            broken = ToolCall(
                name="", arguments={}, id=f"call_{turn}_0", status="malformed_structure", raw=raw, error=_words(error)
            )
            return Parsed(self._tokenizer.decode(token_ids), calls=(broken,))


def _call(found: Any, own_id: str, names: set[str]) -> ToolCall:
    status: CallStatus = str(found.status) if str(found.status) in _STATUSES else "malformed_structure"  # type: ignore[assignment]
    name, arguments, error = found.name or "", found.arguments, ""
    if status == "ok":
        if not isinstance(arguments, dict):
            status, error = "malformed_structure", "the arguments are not an object"
        elif problem := _unusable(arguments):
            status, error = "invalid_json", problem
        elif names and name not in names:
            status = "unknown_tool"
    span = None if found.token_span is None else (int(found.token_span[0]), int(found.token_span[1]))
    return ToolCall(
        name=str(name),
        arguments=arguments if status in ("ok", "unknown_tool") and isinstance(arguments, dict) else {},
        id=str(found.id or own_id),
        status=status,
        raw=str(found.raw)[:_MAX_RAW],
        span=span,
        error=error,
    )


def _unusable(arguments: Mapping[str, Any]) -> str:
    """Return the problem of arguments that Python's JSON reader accepts and others do not; empty without one."""
    try:
        msgspec.msgpack.encode(arguments)
    except (OverflowError, RecursionError, TypeError, ValueError, UnicodeEncodeError) as error:
        return _words(error)
    if is_nested_deeper(arguments, MAX_LEVELS):
        return f"they are nested deeper than {MAX_LEVELS} levels"
    return "" if _is_finite(arguments) else "a number is NaN or infinite"


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list) else True


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
