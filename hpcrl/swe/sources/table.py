"""Rows of a file: JSON lines or Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.errors import MissingExtraError
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.swe.sources.columns import shown
from hpcrl.swe.task import SweTaskError

_BATCH_ROWS = 256


def read_table(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file with their places.

    Raises
    ------
    SweTaskError
        It cannot be read, or a line is not a JSON object.
    MissingExtraError
        It is a Parquet file, and pyarrow is not there.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix in (".jsonl", ".json"):
            yield from _json_lines(path)
        else:
            raise SweTaskError(f"{path} has no suffix that is known\n    hint: name a file with .jsonl or .parquet")
    except OSError as error:
        raise SweTaskError(f"{path} cannot be read: {error.strerror or error}\n    hint: name another file") from error


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = decode_json(line)
            except msgspec.DecodeError as error:
                raise SweTaskError(
                    f"{path}, line {number}: it is not JSON: {error}\n    hint: one row a line"
                ) from None
            if not isinstance(row, dict):
                raise SweTaskError(f"{path}, line {number}: it is not a JSON object: {shown(row)}")
            yield f"line {number}", row


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow  # noqa: PLC0415 - an extra
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise MissingExtraError("export", "pyarrow") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise SweTaskError(f"{path} is not a Parquet file: {shown(str(error))}\n    hint: fetch it again") from None
