"""Rollouts for other tools: a row has its arrays as they lie on disk, and becomes JSON a piece at a time.

Routed experts are hundreds of bytes a token, and as Python's lists ten times that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.payload import view_payload
from hpcrl.dock.ledger.replay import Held
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import rollout_details

__all__ = ["COLUMNS", "RoutedLayout", "export_row", "json_pieces", "routed_layout"]

COLUMNS = ("token_ids", "sampled", "logprobs", "versions", "routed_experts", "routed_present")
_JSON_NUMBERS = 1 << 16
"""Of an array that are lists and text at once."""


def export_row(run: RunDir, held: Held) -> dict[str, Any]:
    """What `hpcrl.runs.views.rollouts.RolloutItem` has, and the columns as arrays; None for what is not on disk."""
    document = rollout_details(run, held)
    columns = document.pop("columns", {})
    document.pop("member", None)
    document["turns"] = [list(turn) for turn in document.get("turns", [])]
    return document | {name: columns.get(name) for name in COLUMNS}


class RoutedLayout(NamedTuple):
    """What holds the routed experts of several rollouts: the most layers, and a dtype for all numbers."""

    layers: int
    dtype: np.dtype[Any]


def routed_layout(run: RunDir, rollouts: Iterable[Held]) -> RoutedLayout | None:
    """What these have, by the headers of their columns alone; None where none has routed experts on disk."""
    found: RoutedLayout | None = None
    for held in rollouts:
        with suppress(OSError, ValueError):  # `export_row` says so
            _, columns = decode_columns(view_payload(run.rollouts_dir / "payload", held.entry.payload))
            if (experts := columns.get("routed_experts")) is not None:
                own = RoutedLayout(experts.shape[1], experts.dtype)
                last = found or own
                found = RoutedLayout(max(last.layers, own.layers), np.promote_types(last.dtype, own.dtype))
    return found


def json_pieces(row: dict[str, Any], *, lines: bool = False) -> Iterator[str]:
    """The JSON object of a row, in pieces of limited size; with ``lines`` each field begins a line."""
    begin, between, end = ("{\n  ", ",\n  ", "\n}") if lines else ("{", ", ", "}")
    for name, value in row.items():
        yield f"{begin}{json.dumps(name)}: "
        begin = between
        if isinstance(value, np.ndarray):
            yield from _array_pieces(value)
        else:
            yield json.dumps(value)
    yield end


def _array_pieces(array: NDArray[Any]) -> Iterator[str]:
    step = max(1, _JSON_NUMBERS // max(1, math.prod(array.shape[1:])))
    yield "["
    for start in range(0, len(array), step):
        numbers = json.dumps(array[start : start + step].tolist())[1:-1]
        yield f", {numbers}" if start else numbers
    yield "]"
