"""Rows of a file, one after the other: JSONL, CSV, Parquet, or what the library ``datasets`` reads.

A file is read once and never held as a whole. Each row comes with the number that an editor shows for its line (of
Parquet and ``datasets``: that of the row, from 1).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import msgspec

from hpcrl.errors import ConfigError, Finding
from hpcrl.installing import install_command
from hpcrl.rollouts.environments.dataset.problems import BadRowError, Problems, shown
from hpcrl.screen_text import visible_line

__all__ = ["SPLIT", "RawRow", "RowSettings", "RowSource", "read_rows"]

SPLIT = "split"
"""Column of rows that ``datasets`` reads: the name of their split."""
_BOM = b"\xef\xbb\xbf"
_SHOWN_NAME = 160
"""Maximum number of characters of a name of a file in a message."""
_SUFFIXES = ".jsonl, .csv, .tsv, .parquet"
_MAX_FIELD = 1 << 30
"""Maximum number of characters of a field of a CSV file."""
_BATCH_ROWS = 1024
"""Rows of a Parquet file that are decoded at a time."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as it stands in the file.

    Attributes
    ----------
    place:
        ``line 17`` or ``row 17``.
    values:
        By column.
    """

    place: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where rows come from.

    Attributes
    ----------
    key:
        The setting that names it.
    name:
        The file, directory or data set of the hub.
    on_hub:
        It is a data set of the hub.
    """

    key: str
    name: str
    on_hub: bool = False

    @property
    def shown(self) -> str:
        """Its name in one line of a message; of a long one the end, which has the file."""
        name = visible_line(self.name)
        return name if len(name) <= _SHOWN_NAME else f"…{name[-_SHOWN_NAME:]}"


class RowSettings(Protocol):
    """What a section of a recipe says of how rows are read.

    Attributes
    ----------
    subset, revision:
        Of a directory or data set that ``datasets`` reads.
    split_column:
        Column that says which rows are held out; needed where ``datasets`` finds several splits.
    """

    @property
    def subset(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def split_column(self) -> str | None: ...


def read_rows(source: RowSource, config: RowSettings, problems: Problems) -> Iterator[RawRow]:
    """Yield the rows of a source; rows that cannot be read go to ``problems``.

    Raises
    ------
    ConfigError
        Nothing can be read from it.
    """
    path = Path(source.name)
    if source.on_hub or path.is_dir():
        yield from _library_rows(source, config, problems)
        return
    readers = {".jsonl": _json_rows, ".csv": _csv_rows, ".tsv": _csv_rows}
    if path.suffix not in (*readers, ".parquet"):
        _refuse(source, problems, f"{source.shown} has no suffix that is known", f"name a file with {_SUFFIXES}")
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(source, problems)
            return
        with path.open("rb") as stream:
            yield from readers[path.suffix](stream, source, problems)
    except OSError as error:
        what = f"{source.shown} cannot be read: {error.strerror or error}"
        hint = "name a file that the node of the orchestrator sees" if isinstance(error, FileNotFoundError) else ""
        _refuse(source, problems, what, hint)


def _json_rows(stream: BinaryIO, source: RowSource, problems: Problems) -> Iterator[RawRow]:
    decoder = msgspec.json.Decoder()
    for number, line in enumerate(stream, 1):
        text = line.removeprefix(_BOM) if number == 1 else line
        if not text.strip():
            continue
        try:
            yield RawRow(f"line {number}", _object(text, decoder))
        except BadRowError as error:
            problems.add(source.key, f"{source.shown}, line {number}: {error.what}: {shown(line)}", error.hint)


def _object(line: bytes, decoder: msgspec.json.Decoder[Any]) -> dict[str, Any]:
    """Decode one line."""
    try:
        value = decoder.decode(line)
    except msgspec.DecodeError as error:
        # the message of msgspec ends with a position in bytes, which is that of an editor in most lines
        raise BadRowError(f"no JSON ({error})", "write one JSON object a line, without NaN or Infinity") from None
    except UnicodeDecodeError:
        raise _not_utf8(line) from None
    except RecursionError:
        raise BadRowError("JSON that is nested too deeply", "write one flat JSON object a line") from None
    if not isinstance(value, dict):
        raise BadRowError("no JSON object", 'write one JSON object a line: {"prompt": "...", "answer": "..."}')
    return value


def _not_utf8(line: bytes) -> BadRowError:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return BadRowError(f"byte {error.start + 1} is not UTF-8", "convert the file to UTF-8, as with iconv")
    raise AssertionError("it is UTF-8")


def _csv_rows(stream: BinaryIO, source: RowSource, problems: Problems) -> Iterator[RawRow]:
    csv.field_size_limit(_MAX_FIELD)

    def lines() -> Iterator[str]:
        for number, line in enumerate(stream, 1):
            try:
                yield (line.removeprefix(_BOM) if number == 1 else line).decode()
            except UnicodeDecodeError:
                bad = _not_utf8(line)
                problems.add(source.key, f"{source.shown}, line {number}: {bad.what}: {shown(line)}", bad.hint)
                yield line.decode("utf-8", "replace")

    reader = csv.reader(lines(), delimiter="\t" if source.name.endswith(".tsv") else ",", strict=True)
    header: list[str] = []
    while True:
        begin = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            # where a field ends is not known any more, nor what the next line is
            hint = "write a quote inside of a field twice, and close each field"
            problems.add(source.key, f"{source.shown}, line {begin}: no CSV ({error})", hint)
            return
        if fields is None:
            return
        if not fields:
            continue
        if not header:
            header = fields
            if len({*header}) < len(header):
                what = f"{source.shown}, line {begin}: a column stands there twice: {shown(','.join(header))}"
                _refuse(source, problems, what, "name each column once in the first line")
        elif len(fields) != len(header):
            what = f"{len(fields)} fields, and the first line has {len(header)}: {shown(','.join(fields))}"
            problems.add(source.key, f"{source.shown}, line {begin}: {what}", "quote fields with commas in them")
        else:
            yield RawRow(f"line {begin}", dict(zip(header, fields, strict=True)))


def _parquet_rows(source: RowSource, problems: Problems) -> Iterator[RawRow]:
    try:
        import pyarrow  # noqa: PLC0415 - an extra
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        _refuse(source, problems, "Parquet files need the Python module 'pyarrow'", install_command("export"))
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(source.name) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield RawRow(f"row {number}", values)
    except pyarrow.ArrowException as error:
        _refuse(source, problems, f"{source.shown} is no Parquet file: {shown(str(error))}", "write it again")


def _library_rows(source: RowSource, config: RowSettings, problems: Problems) -> Iterator[RawRow]:
    """Read with ``datasets``: a directory, also one of ``save_to_disk``, or a data set of the hub."""
    try:
        import datasets  # noqa: PLC0415 - an extra, and large
    except ImportError:
        what = "directories and data sets of the hub need the Python module 'datasets'"
        _refuse(source, problems, what, install_command("datasets"))
    revision = config.revision if source.on_hub else None
    try:
        if not source.on_hub and (Path(source.name) / "state.json").exists():
            splits = {"train": datasets.load_from_disk(source.name)}
        elif not source.on_hub and (Path(source.name) / "dataset_dict.json").exists():
            splits = dict(datasets.load_from_disk(source.name))
        else:
            splits = dict(datasets.load_dataset(source.name, config.subset, revision=revision))
    except Exception as error:  # noqa: BLE001 - the library raises errors of many others
        what = f"datasets cannot load {source.shown}: {type(error).__name__}: {shown(str(error))}"
        hint = "try it in Python: datasets.load_dataset(...); offline, load it into the cache on a node with a network"
        _refuse(source, problems, what, hint)
    if len(splits) > 1 and config.split_column is None:
        what = f"{source.shown} has the splits {', '.join(splits)}"
        _refuse(source, problems, what, "set split_column: split, with train_values and held_out_values")
    number = 0
    for split, rows in splits.items():
        for values in rows:
            number += 1
            yield RawRow(f"row {number}", {SPLIT: split, **values})


def _refuse(source: RowSource, problems: Problems, what: str, hint: str) -> NoReturn:
    raise ConfigError([Finding("recipe", f"{problems.section}.{source.key}", what, hint)])
