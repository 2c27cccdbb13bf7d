"""Rows of a file, JSON lines or Parquet, or of a directory with a table in several files, as the hub has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.errors import MissingExtraError
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.swe.sources.columns import shown_value
from hpcrl.swe.task import SweTaskError

_BATCH_ROWS = 256
_JSON = (".jsonl", ".json")
_PARTS = (".jsonl", ".parquet")
"""Suffixes in a directory; files with ``.json`` describe a data set there."""
_PART = re.compile(r"-\d+-of-\d+$")
"""End of the name of a part of a table, before the suffix: ``train-00000-of-00004.parquet``."""


def read_table(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file, or of the parts of a table in a directory, with their places.

    Raises
    ------
    SweTaskError
        It cannot be read, a line is not a JSON object, or a directory has no table or several.
    MissingExtraError
        It is a Parquet file, and pyarrow is not there.
    """
    try:
        if path.is_dir():
            for part in _parts(path):
                yield from ((f"{part.name}, {place}", row) for place, row in read_table(part))
        elif path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix in _JSON:
            yield from _json_lines(path)
        else:
            raise SweTaskError(f"{path} has no suffix that is known\n    hint: name a file with .jsonl or .parquet")
    except OSError as error:
        raise SweTaskError(f"{path} cannot be read: {error.strerror or error}\n    hint: name another file") from error


def _parts(directory: Path) -> list[Path]:
    """Return the files of the one table in a directory, in the order of their names."""
    parts = sorted(path for path in directory.iterdir() if path.suffix in _PARTS and path.name[0] != ".")
    tables = sorted({_PART.sub("", path.stem) for path in parts})
    if not parts:
        raise SweTaskError(f"{directory} has no file with .jsonl or .parquet\n    hint: name the directory with them")
    if len(tables) > 1:
        # the splits of a data set: one of them may be its benchmark, which must not be trained on with the others
        raise SweTaskError(
            f"{directory} has several tables: {', '.join(tables)}\n"
            "    hint: name a file, or a directory with the files of one table"
        )
    return parts


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
                raise SweTaskError(f"{path}, line {number}: it is not a JSON object: {shown_value(row)}")
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
        raise SweTaskError(
            f"{path} is not a Parquet file: {shown_value(str(error))}\n    hint: fetch it again"
        ) from None
