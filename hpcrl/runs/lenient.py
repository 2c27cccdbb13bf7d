"""Read records for people: what is null where a number should be is unknown, and a line that is no record is left out.

JSON has no number for what is not finite, and earlier versions wrote null in its place. Nothing that a record says ends
a command that shows it.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

import msgspec

from hpcrl.decoding import prepared

__all__ = ["convert_lenient", "decode_lenient", "finite"]

_T = TypeVar("_T")
_NO_JSON = (b"NaN", b"Infinity")
_LEFT_OUT: Any = object()
_IDENTITY = frozenset({"attempt", "step", "version"})
"""Fields without which nobody knows what a record is about."""


def decode_lenient(line: bytes, kind: type[_T]) -> _T | None:
    """Decode a line of JSON as a struct; None where it is no such record.

    A number that is null, or is written as ``NaN`` or ``Infinity``, is NaN in a field of a struct; in a dictionary or
    a list it is left out.
    """
    try:
        return msgspec.json.decode(line, type=prepared(kind))
    except (ValueError, RecursionError):
        if not line.strip():
            return None
    try:
        value = json.loads(line) if any(word in line for word in _NO_JSON) else msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None  # the torn last line of a writer that was killed
    return convert_lenient(value, kind)


def convert_lenient(value: Any, kind: type[_T]) -> _T | None:
    """Convert plain values to a struct as `decode_lenient` does; None where they are no such record."""
    try:
        return msgspec.convert(_mended(value, msgspec.inspect.type_info(kind)), kind)
    except (ValueError, TypeError, RecursionError):
        return None


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
    """Return what stands for an unknown value of a type: NaN, None, or that there is none."""
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
        # a count or a table that is unknown, in a record that must have it; not what says which record it is
        if field.required and mended.get(name) is _LEFT_OUT and name not in _IDENTITY:
            if isinstance(field.type, msgspec.inspect.IntType):
                found[name] = 0
            elif isinstance(field.type, msgspec.inspect.DictType):
                found[name] = {}
    return found


def _is_unknown(value: Any) -> bool:
    return value is _LEFT_OUT or (isinstance(value, float) and not math.isfinite(value))
