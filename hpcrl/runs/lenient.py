"""Read records for people leniently: a null in place of a number is unknown, and invalid lines are left out.

JSON cannot represent numbers that are not finite, and earlier versions wrote null instead. The content of a record
never makes a command fail that shows it.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

import msgspec

from hpcrl.storage.msgspec_types import prepared

_T = TypeVar("_T")
_NO_JSON = (b"NaN", b"Infinity")
_LEFT_OUT: Any = object()
_IDENTITY = frozenset({"attempt", "step", "version"})
"""Fields that identify a record."""


def decode_lenient(line: bytes, kind: type[_T]) -> _T | None:
    """Decode a line of JSON as a struct; None where it is not such a record.

    A number that is null, or is written as ``NaN`` or ``Infinity``, is NaN in a field of a struct; in a dictionary or
    a list it is left out.
    """
    if (found := _decode(line, kind)) is not None or not line.strip():
        return found
    try:
        value = json.loads(line) if any(word in line for word in _NO_JSON) else msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None  # the torn last line of a writer that was killed
    return _convert_mended(value, kind)


def convert_lenient(value: Any, kind: type[_T]) -> _T | None:
    """Convert plain values to a struct as `decode_lenient` does; None where they are no such record."""
    # nearly all records are whole, and looking at each value takes ten times as long as this way through JSON
    try:
        line = msgspec.json.encode(value)
    except (ValueError, TypeError, RecursionError):
        return _convert_mended(value, kind)
    found = _decode(line, kind)
    return _convert_mended(value, kind) if found is None else found


def _decode(line: bytes, kind: type[_T]) -> _T | None:
    """Decode a line without mending it; None where that is not possible."""
    try:
        return msgspec.json.decode(line, type=prepared(kind))
    except (ValueError, RecursionError):
        return None


def _convert_mended(value: Any, kind: type[_T]) -> _T | None:
    try:
        return msgspec.convert(_mended(value, _type_info(kind)), kind)
    except (ValueError, TypeError, RecursionError):
        return None


_type_infos: dict[Any, msgspec.inspect.Type] = {}


def _type_info(kind: Any) -> msgspec.inspect.Type:
    # it takes a millisecond, and a run has thousands of records of a type
    if kind not in _type_infos:
        _type_infos[kind] = msgspec.inspect.type_info(kind)
    return _type_infos[kind]


def finite(value: Any) -> Any:
    """Return plain values with None in place of numbers that are not finite: JSON has none for them."""
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mended(value: Any, kind: msgspec.inspect.Type) -> Any:
    """Return ``value`` with NaN, or nothing, where a number is unknown."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return _unknown(kind)
    if isinstance(kind, msgspec.inspect.UnionType):
        structs = [each for each in kind.types if isinstance(each, msgspec.inspect.StructType)]
        kind = structs[0] if len(structs) == 1 else kind
    match kind:
        case msgspec.inspect.DictType() if isinstance(value, dict):
            items = {name: _mended(each, kind.value_type) for name, each in value.items()}
            return {name: each for name, each in items.items() if not _is_unknown(each)}
        case msgspec.inspect.ListType() if isinstance(value, list):
            return [each for each in (_mended(each, kind.item_type) for each in value) if not _is_unknown(each)]
        case msgspec.inspect.StructType() if isinstance(value, dict):
            return _mended_struct(value, kind)
    return value


def _unknown(kind: msgspec.inspect.Type) -> Any:
    """Return the replacement for an unknown value of a type: NaN, None, or a mark to leave it out."""
    if isinstance(kind, msgspec.inspect.FloatType):
        return math.nan
    allowed = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    has_none = any(isinstance(each, msgspec.inspect.NoneType | msgspec.inspect.AnyType) for each in allowed)
    return None if has_none else _LEFT_OUT


def _mended_struct(value: dict[str, Any], kind: msgspec.inspect.StructType) -> dict[str, Any]:
    known = {field.encode_name: field for field in kind.fields}
    mended = {name: _mended(each, known[name].type) if name in known else each for name, each in value.items()}
    found = {name: each for name, each in mended.items() if each is not _LEFT_OUT}
    for name, field in known.items():
        # a required count or table that is unknown; fields that identify the record are not replaced
        if field.required and mended.get(name) is _LEFT_OUT and name not in _IDENTITY:
            if isinstance(field.type, msgspec.inspect.IntType):
                found[name] = 0
            elif isinstance(field.type, msgspec.inspect.DictType):
                found[name] = {}
    return found


def _is_unknown(value: Any) -> bool:
    return value is _LEFT_OUT or (isinstance(value, float) and not math.isfinite(value))
