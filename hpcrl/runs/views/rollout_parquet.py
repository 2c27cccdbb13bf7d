"""Rollouts as Parquet, from arrays as they lie on disk: this needs pyarrow.

Columns are views of the arrays, and no more rollouts are held at once than a group of rows has. Routed experts are a
column a layer: Parquet's writer takes each column of a group by itself, and what it has of one at a time is levels, a
wider number and an encoded page for each number, many times what they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hpcrl.runs.views.rollout_export import COLUMNS, PART, RoutedLayout

_GROUP_ROWS = 256
_GROUP_BYTES = 16 << 20
"""Maximum bytes of arrays in a row group of a Parquet file; a larger rollout is a group by itself."""
_ROUTED = "routed_experts"


def write_parquet(
    output: Path, rows: Iterable[dict[str, Any]], routed: RoutedLayout | None, parts: Sequence[str]
) -> None:
    """Write rows of `hpcrl.runs.views.rollout_export.RolloutExport` into a new file.

    Parameters
    ----------
    routed:
        Common layout of routed experts; where it is None the file has no column for them.
    parts:
        Names of parts of rewards, each a column.
    """
    schema = _schema(routed, parts)
    with pq.ParquetWriter(output, schema) as writer:
        for chunk in _groups(rows):
            columns = [_column([row.get(field.name) for row in chunk], field) for field in schema]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=len(chunk))
            del chunk, columns  # released before the next ones are read


def _schema(routed: RoutedLayout | None, parts: Sequence[str]) -> Any:
    text, whole, number = pa.string(), pa.int64(), pa.float64()
    fields = {
        **dict.fromkeys(("id", "environment", "state", "why", "text", "problem"), text),
        **dict.fromkeys(("prompt_index", "tokens", "sampled_tokens", "first_version", "last_version"), whole),
        **dict.fromkeys(("group", "member", "step", "staleness", "branches"), whole),
        **dict.fromkeys(("reward", "advantage", "seconds", "ended_s"), number),
        **{f"{PART}{name}": number for name in parts},
        "turns": pa.list_(pa.list_(number)),
        "token_ids": pa.list_(pa.int32()),
        "sampled": pa.list_(pa.uint8()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "starts": pa.list_(pa.int32()),
        "shared": pa.list_(pa.int32()),
    }
    if routed is not None:
        tokens = pa.list_(pa.list_(pa.from_numpy_dtype(routed.dtype)))
        fields[_ROUTED] = pa.struct({f"layer_{layer}": tokens for layer in range(routed.layers)})
    return pa.schema({**fields, "routed_present": pa.list_(pa.uint8())})


def _groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield groups of rows that are written together."""
    chunk: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        own = sum(value.nbytes for value in row.values() if isinstance(value, np.ndarray))
        if chunk and (size + own > _GROUP_BYTES or len(chunk) == _GROUP_ROWS):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += own
        del row  # otherwise the last row of a group would stay in memory with the next group
    if chunk:
        yield chunk


def _column(values: list[Any], field: Any) -> Any:
    if field.name == _ROUTED:
        return pa.chunked_array([_layers(value, field.type) for value in values], type=field.type)
    if field.name in COLUMNS:
        return pa.chunked_array([_numbers(value, field.type) for value in values], type=field.type)
    return pa.array(values, type=field.type)


def _numbers(array: NDArray[Any] | None, kind: Any) -> Any:
    """Return one row that is a list of numbers: the array's own memory, where it has the dtype that is written."""
    if array is None:
        return pa.nulls(1, kind)
    numbers = pa.array(array.astype(kind.value_type.to_pandas_dtype(), copy=False))
    return pa.ListArray.from_arrays(_begins(1, len(numbers)), numbers)


def _layers(experts: NDArray[Any] | None, kind: Any) -> Any:
    """Return one row of experts ``[T, layers, k]``: for each layer a list of tokens, each a list of ``k`` numbers."""
    if experts is None:
        return pa.nulls(1, kind)
    tokens, layers, width = experts.shape
    dtype = kind.field(0).type.value_type.value_type.to_pandas_dtype()
    all_tokens, each_token = _begins(1, tokens), _begins(tokens, width)
    columns = []
    for layer in range(kind.num_fields):
        if layer < layers:
            # contiguous, as Arrow stores them: all layers together are one copy of the experts
            numbers = pa.array(np.ascontiguousarray(experts[:, layer], dtype=dtype).reshape(-1))
            columns.append(pa.ListArray.from_arrays(all_tokens, pa.ListArray.from_arrays(each_token, numbers)))
        else:
            columns.append(pa.nulls(1, kind.field(layer).type))
    return pa.StructArray.from_arrays(columns, fields=list(kind))


def _begins(lists: int, length: int) -> Any:
    """Return the offsets of ``lists`` lists of equal ``length``, the end of the last included."""
    return pa.array(np.arange(lists + 1, dtype=np.int32) * np.int32(length))
