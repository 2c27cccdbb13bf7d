"""Rows of a file, one after the other: JSONL, CSV, Parquet, or what the library ``datasets`` reads.

A file is read once and never held as a whole. Each row comes with the number that an editor shows for its line (of
Parquet and ``datasets``: that of the row, from 1).
"""

from __future__ import annotations

import codecs
import csv
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol, cast

import msgspec

from hpcrl.errors import ConfigError, Finding
from hpcrl.installing import install_command
from hpcrl.reporting.screen_text import visible_line
from hpcrl.rollouts.environments.dataset.problems import BadRowError, Problems, shown

SPLIT = "split"
"""Column of rows that ``datasets`` reads: the name of their split."""
_BOM = b"\xef\xbb\xbf"
_SHOWN_NAME = 160
"""Maximum number of characters of a name of a file in a message."""
_SUFFIXES = ".jsonl, .csv, .tsv (also .gz), .parquet"
_MAX_FIELD = 1 << 30
"""Maximum number of characters of a field of a CSV file."""
_BATCH_ROWS = 1024
"""Rows of a Parquet file that are decoded at a time."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """Row as it is in the file.

    Attributes
    ----------
    place:
        ``line 17`` or ``row 17``.
    values:
        Values by column.
    """

    place: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowSource:
    """Source of rows.

    Attributes
    ----------
    key:
        Setting that names the source.
    name:
        File, directory or data set of the hub.
    on_hub:
        True where it is a data set of the hub.
    """

    key: str
    name: str
    on_hub: bool = False

    @property
    def shown(self) -> str:
        """Return its name for one line of a message; of a long name the end, which contains the file."""
        name = visible_line(self.name)
        return name if len(name) <= _SHOWN_NAME else f"…{name[-_SHOWN_NAME:]}"


class RowSettings(Protocol):
    """Settings of a recipe that control how rows are read.

    Attributes
    ----------
    subset, revision:
        Subset and revision of a directory or data set that ``datasets`` reads.
    split_column:
        Column that marks held-out rows; required where ``datasets`` finds several splits.
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
    packed = path.suffix.lower() == ".gz"
    suffix = _inner(path).suffix.lower()
    if suffix == ".json" and path.exists():
        hint = "write one JSON object a line, without brackets around them, and name it .jsonl: jq -c '.[]' does so"
        _refuse(source, problems, f"{source.shown} is one JSON document, and rows are read from JSON lines", hint)
    if suffix not in readers and (packed or suffix != ".parquet"):
        _refuse(source, problems, f"{source.shown} has an unknown suffix", f"name a file with {_SUFFIXES}")
    try:
        if suffix == ".parquet":
            yield from _parquet_rows(source, problems)
            return
        with gzip.open(path, "rb") if packed else path.open("rb") as stream:
            _check_encoding(cast(BinaryIO, stream), source, problems)
            yield from readers[suffix](cast(BinaryIO, stream), source, problems)
    except (EOFError, zlib.error) as error:
        _refuse(source, problems, f"{source.shown} is not a whole gzip file: {error}", "copy it again")
    except OSError as error:
        what = f"{source.shown} cannot be read: {error.strerror or error}"
        hint = (
            "name a file that is visible on the node of the orchestrator"
            if isinstance(error, FileNotFoundError)
            else ""
        )
        _refuse(source, problems, what, hint)


def _inner(path: Path) -> Path:
    """Return a path without the suffix of gzip."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


def _check_encoding(stream: BinaryIO, source: RowSource, problems: Problems) -> None:
    """Refuse UTF-16 and UTF-32, which would be no JSON in every line."""
    begin = stream.read(4)
    stream.seek(0)
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in begin:
        name = "UTF-32" if begin == codecs.BOM_UTF32_LE or begin.count(b"\0") > len(begin) // 2 else "UTF-16"
        what = f"{source.shown} is text in {name}, not in UTF-8"
        _refuse(source, problems, what, f"convert it: iconv -f {name} -t UTF-8 FILE > NEW_FILE")


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

    reader = csv.reader(
        lines(), delimiter="\t" if _inner(Path(source.name)).suffix.lower() == ".tsv" else ",", strict=True
    )
    header: list[str] = []
    while True:
        begin = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            # the end of this field is unknown, and so is the beginning of the next row
            hint = "write a quote inside of a field twice, and close each field"
            problems.add(source.key, f"{source.shown}, line {begin}: no CSV ({error})", hint)
            return
        if fields is None:
            return
        if not fields:
            continue
        if not header:
            header = fields
            _check_separator(header, source, problems)
            if len({*header}) < len(header):
                what = f"{source.shown}, line {begin}: a column appears twice: {shown(','.join(header))}"
                _refuse(source, problems, what, "name each column once in the first line")
        elif len(fields) != len(header):
            what = f"{len(fields)} fields, and the first line has {len(header)}: {shown(','.join(fields))}"
            problems.add(source.key, f"{source.shown}, line {begin}: {what}", "quote fields with commas in them")
        else:
            yield RawRow(f"line {begin}", dict(zip(header, fields, strict=True)))


def _check_separator(header: list[str], source: RowSource, problems: Problems) -> None:
    """Refuse a file whose first line has no separator but that of another kind of file."""
    if len(header) > 1:
        return
    for found, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")):
        if found in header[0]:
            what = f"{source.shown}, line 1: columns are separated by {name}: {shown(header[0])}"
            hint = "name it .tsv" if found == "\t" else "write the file again with commas as .csv, or with tabs as .tsv"
            _refuse(source, problems, what, hint)


def _parquet_rows(source: RowSource, problems: Problems) -> Iterator[RawRow]:
    try:
        import pyarrow  # noqa: PLC0415 - an extra
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        _refuse(source, problems, "Parquet files need the Python module 'pyarrow'", install_command("export"))
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(source.name) as file:
            names = file.schema_arrow.names
            if len({*names}) < len(names):
                what = f"{source.shown}: a column appears twice: {shown(','.join(names))}"
                _refuse(source, problems, what, "give each column a name of its own")
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield RawRow(f"row {number}", values)
    except UnicodeDecodeError as error:
        what = f"{source.shown}, behind row {number}: text is not UTF-8 ({error.reason})"
        _refuse(source, problems, what, "write the file again with its text in UTF-8")
    except pyarrow.ArrowException as error:
        _refuse(source, problems, f"{source.shown} is not a Parquet file: {shown(str(error))}", "write it again")


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
    try:
        for split, rows in splits.items():
            for values in rows:
                number += 1
                yield RawRow(f"row {number}", {SPLIT: split, **values})
    except Exception as error:  # noqa: BLE001 - it decodes rows when they are asked for
        what = f"datasets cannot read {source.shown} behind row {number}: {type(error).__name__}: {shown(str(error))}"
        _refuse(source, problems, what, "try it in Python: datasets.load_dataset(...)")


def _refuse(source: RowSource, problems: Problems, what: str, hint: str) -> NoReturn:
    raise ConfigError([Finding("recipe", f"{problems.section}.{source.key}", what, hint)])
