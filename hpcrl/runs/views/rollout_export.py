"""Rollouts for other tools: a row has its arrays as they lie on disk, and becomes JSON a piece at a time.

Routed experts are hundreds of bytes a token, and as Python's lists ten times that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.payload import view_payload
from hpcrl.dock.ledger.replay import Held
from hpcrl.dock.sequences import own_tokens, turn_fields
from hpcrl.runs.lenient import finite
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import ConsumedLines, rollout_details

COLUMNS = ("token_ids", "sampled", "logprobs", "versions", "routed_experts", "routed_present", "starts", "shared")
FIELDS = ("text", "advantage", "seconds", "turns", "problem")
"""Further columns of a row, besides `hpcrl.runs.views.rollouts.RolloutItem` and the arrays; None where unknown."""
PART = "parts."
"""Prefix of the column of a part of a reward."""
Decode = Callable[[list[int]], str]
_JSON_NUMBERS = 1 << 16
"""Maximum numbers of an array that are lists and text at the same time."""


class RolloutExport:
    """Rows of rollouts, all with the same columns.

    Attributes
    ----------
    parts:
        Names of all parts of their rewards.
    """

    def __init__(self, run: RunDir, rollouts: Sequence[Held], decode: Decode | None = None) -> None:
        """Find the names of parts; the rows are read one by one.

        Parameters
        ----------
        decode:
            Makes text of token ids. None: the text that was kept of a rollout that was trained stands for it.
        """
        self._run, self._consumed, self._decode = run, ConsumedLines(run), decode
        self.parts: list[str] = sorted({name for held in rollouts for name in self._parts_of(held)})

    def _parts_of(self, held: Held) -> dict[str, Any]:
        parts = self._consumed.of(held).get("parts")
        if not parts:
            with suppress(OSError, ValueError):  # `row` says so
                about, _ = decode_columns(view_payload(self._run.rollouts_dir / "payload", held.entry.payload))
                parts = msgspec.msgpack.decode(about).get("parts")
        return parts if isinstance(parts, dict) else {}

    def row(self, held: Held) -> dict[str, Any]:
        """Return the row of a rollout: the fields of `RolloutItem`, `FIELDS`, parts, and the arrays of `COLUMNS`.

        Fields that are not on disk any more are None: for a rollout trained long ago, only the arrays.
        """
        document = rollout_details(self._run, held, self._consumed)
        columns = document.pop("columns", {})
        if "token_ids" in columns and self._decode is not None:
            document["text"] = self._decode(own_tokens(columns).tolist())
        if "token_ids" in columns:
            columns = {name: np.zeros(1, np.int32) for name in ("starts", "shared")} | columns
        document["group"], document["member"] = held.id
        parts = document.pop("parts", {})
        document["turns"] = [turn_fields(turn) for turn in document.get("turns", [])]
        document |= {name: document.get(name) for name in FIELDS}
        document |= {f"{PART}{name}": parts.get(name) for name in self.parts}
        return {name: finite(value) for name, value in document.items()} | {name: columns.get(name) for name in COLUMNS}


def export_row(run: RunDir, held: Held, decode: Decode | None = None) -> dict[str, Any]:
    """Return the row of one rollout, with its own columns."""
    return RolloutExport(run, [held], decode).row(held)


class RoutedLayout(NamedTuple):
    """Common layout for the routed experts of several rollouts: the most layers, and a dtype for all numbers."""

    layers: int
    dtype: np.dtype[Any]


def routed_layout(run: RunDir, rollouts: Iterable[Held]) -> RoutedLayout | None:
    """Return the common layout, from the headers of columns alone; None where no rollout has routed experts on disk."""
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
    """Yield the JSON object of a row in pieces of limited size; with ``lines`` each field begins a line."""
    begin, between, end = ("{\n  ", ",\n  ", "\n}") if lines else ("{", ", ", "}")
    for name, value in row.items():
        yield f"{begin}{json.dumps(name)}: "
        begin = between
        if isinstance(value, np.ndarray):
            yield from _array_pieces(value)
        else:
            yield json.dumps(finite(value), allow_nan=False)
    yield end


def _array_pieces(array: NDArray[Any]) -> Iterator[str]:
    step = max(1, _JSON_NUMBERS // max(1, math.prod(array.shape[1:])))
    yield "["
    for start in range(0, len(array), step):
        piece = array[start : start + step]
        whole = piece.dtype.kind != "f" or bool(np.isfinite(piece).all())
        numbers = json.dumps(piece.tolist() if whole else finite(piece.tolist()), allow_nan=False)[1:-1]
        yield f", {numbers}" if start else numbers
    yield "]"
