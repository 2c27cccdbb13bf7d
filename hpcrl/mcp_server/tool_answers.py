"""Answers of the tools: text of a bounded length, and errors as the command line prints them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

from mcp.server.mcpserver.exceptions import ToolError

from hpcrl.errors import HpcrlError, refusal

MAX_CHARACTERS = 60_000
"""Maximum length of an answer, about 15,000 tokens of a language model."""
_HEAD = 200
"""Characters that are kept free for what stands before a list."""
_P = ParamSpec("_P")


def as_document(value: Any) -> str:
    """Return a value as JSON; what JSON has no form for is written as its text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def list_document(name: str, items: Sequence[Any], total: int) -> str:
    """Return a JSON document with the last items that fit into an answer.

    Parameters
    ----------
    name:
        Key of the list.
    items:
        In time order, so that the newest are kept.
    total:
        Number of items that there are; those that were not asked for count as well.
    """
    rows, left_out = newest_that_fit([as_document(item) for item in items])
    note = f', "left_out_for_length": {left_out}' if left_out else ""
    listed = ",\n".join(rows)
    return f'{{"{name}_in_all": {total}{note}, "{name}": [\n{listed}\n]}}'


def newest_that_fit(lines: Sequence[str]) -> tuple[list[str], int]:
    """Return the last lines that fit into an answer, in their order, and the number of those left out."""
    room = MAX_CHARACTERS - _HEAD
    kept: list[str] = []
    for line in reversed(lines):
        room -= len(line) + 2
        if room < 0:
            break
        kept.append(line)
    return kept[::-1], len(lines) - len(kept)


def told(function: Callable[_P, str]) -> Callable[_P, str]:
    """Return a tool that cuts long answers and turns refusals of hpcrl into errors that the agent can read.

    Raises
    ------
    ToolError
        The tool raised an error that is meant for people, or the filesystem refused.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> str:
        try:
            text = function(*args, **kwargs)
        except HpcrlError as error:
            raise ToolError(str(error)) from error
        except OSError as error:
            if (known := refusal(error)) is None:
                raise
            raise ToolError(str(known)) from error
        if len(text) <= MAX_CHARACTERS:
            return text
        return f"{text[:MAX_CHARACTERS]}\n[cut: {len(text) - MAX_CHARACTERS} more characters; ask for less]"

    return call
