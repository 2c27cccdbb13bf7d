"""Rollouts as Parquet, from arrays as they lie on disk: this needs pyarrow.

Columns are views of the arrays, and no more rollouts are held at once than a group of rows has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hpcrl.runs.views.rollout_export import COLUMNS

__all__ = ["write_parquet"]

_GROUP_ROWS = 256
_GROUP_BYTES = 16 << 20
"""Of arrays in a group of rows of a Parquet file, which its writer holds several times over; a rollout that has more is
a group by itself."""


def write_parquet(output: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows of `hpcrl.runs.views.rollout_export.export_row` into a new file."""
    schema = _schema()
    with pq.ParquetWriter(output, schema) as writer:
        for chunk in _groups(rows):
            columns = [_column([row.get(field.name) for row in chunk], field) for field in schema]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=len(chunk))
            del chunk, columns  # or they would be held while the next ones are read


def _schema() -> Any:
    text, whole, number = pa.string(), pa.int64(), pa.float64()
    return pa.schema(
        {
            **dict.fromkeys(("id", "environment", "state", "why", "text", "problem"), text),
            **dict.fromkeys(("prompt_index", "tokens", "sampled_tokens", "first_version", "last_version"), whole),
            **dict.fromkeys(("step", "staleness"), whole),
            **dict.fromkeys(("reward", "seconds", "ended_s"), number),
            "parts": pa.map_(text, number),
            "turns": pa.list_(pa.list_(number)),
            "token_ids": pa.list_(pa.int32()),
            "sampled": pa.list_(pa.uint8()),
            "logprobs": pa.list_(pa.float32()),
            "versions": pa.list_(pa.int32()),
            "routed_experts": pa.list_(pa.list_(pa.list_(pa.uint16()))),
            "routed_present": pa.list_(pa.uint8()),
        }
    )


def _groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rows that are written together."""
    chunk: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        own = sum(value.nbytes for value in row.values() if isinstance(value, np.ndarray))
        if chunk and (size + own > _GROUP_BYTES or len(chunk) == _GROUP_ROWS):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += own
        del row  # or the last one of a group would be held beside the next
    if chunk:
        yield chunk


def _column(values: list[Any], field: Any) -> Any:
    if field.name in COLUMNS:
        return pa.chunked_array([_lists(value, field.type) for value in values], type=field.type)
    if pa.types.is_map(field.type):
        values = [list((value or {}).items()) for value in values]
    return pa.array(values, type=field.type)


def _lists(array: NDArray[Any] | None, kind: Any) -> Any:
    """One row of nested lists: the array's own memory with offsets, where it has the dtype that is written."""
    if array is None:
        return pa.nulls(1, kind)
    leaf = kind
    while pa.types.is_list(leaf):
        leaf = leaf.value_type
    found = pa.array(array.reshape(-1).astype(leaf.to_pandas_dtype(), copy=False))
    for depth in range(array.ndim - 1, -1, -1):
        lists, length = math.prod(array.shape[:depth]), array.shape[depth]
        offsets = np.arange(lists + 1, dtype=np.int32) * np.int32(length)
        found = pa.ListArray.from_arrays(pa.array(offsets), found)
    return found
