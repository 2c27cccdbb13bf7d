"""Values of tests and of a program as JSON, between two processes in a sandbox (see `code_judge`, next to this file).

Only plain data has a form: any other object is a reference, made and resolved by the one who calls. Python 3.8 reads
this file.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any, Callable  # noqa: UP035

_PLAIN_BITS = 63


def _parts(tag: str) -> Callable[[Any, Callable[[Any], Any]], Any]:
    return lambda value, refer: [tag, *(encode_value(each, refer) for each in value)]


def _whole_number(value: int) -> Any:
    # the JSON module refuses very long ones
    return value if value.bit_length() <= _PLAIN_BITS else ["i", hex(value)]


# subclasses are sent as what they are derived from: their own methods stay behind
_FORMS: tuple[tuple[Any, Callable[[Any, Callable[[Any], Any]], Any]], ...] = (
    ((bool, type(None)), lambda value, refer: value),
    (int, lambda value, refer: _whole_number(int(value))),
    (float, lambda value, refer: float(value)),
    (str, lambda value, refer: str.__str__(value)),
    (list, _parts("l")),
    (tuple, _parts("t")),
    (set, _parts("s")),
    (frozenset, _parts("z")),
    (dict, lambda value, refer: ["d", *([encode_value(k, refer), encode_value(v, refer)] for k, v in value.items())]),
    (bytes, lambda value, refer: ["b", value.hex()]),
    (bytearray, lambda value, refer: ["y", value.hex()]),
    (complex, lambda value, refer: ["c", value.real, value.imag]),
    (range, lambda value, refer: ["r", value.start, value.stop, value.step]),
    (Decimal, lambda value, refer: ["D", str(value)]),
    (Fraction, lambda value, refer: ["F", hex(value.numerator), hex(value.denominator)]),
)


def encode_value(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return a value as JSON; what is not plain data is given to ``refer``."""
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value, refer)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return encode_value(value.item(), refer)
    return refer(value)


_READERS: dict[str, Callable[[list[Any], Callable[[int], Any]], Any]] = {
    "h": lambda parts, resolve: resolve(parts[0]),
    "i": lambda parts, resolve: int(parts[0], 16),
    "l": lambda parts, resolve: [decode_value(each, resolve) for each in parts],
    "t": lambda parts, resolve: tuple(decode_value(each, resolve) for each in parts),
    "s": lambda parts, resolve: {decode_value(each, resolve) for each in parts},
    "z": lambda parts, resolve: frozenset(decode_value(each, resolve) for each in parts),
    "d": lambda parts, resolve: {decode_value(key, resolve): decode_value(each, resolve) for key, each in parts},
    "b": lambda parts, resolve: bytes.fromhex(parts[0]),
    "y": lambda parts, resolve: bytearray.fromhex(parts[0]),
    "c": lambda parts, resolve: complex(*parts),
    "r": lambda parts, resolve: range(*parts),
    "D": lambda parts, resolve: Decimal(parts[0]),
    "F": lambda parts, resolve: Fraction(int(parts[0], 16), int(parts[1], 16)),
}


def decode_value(value: Any, resolve: Callable[[int], Any]) -> Any:
    """Return the value of `encode_value`.

    Parameters
    ----------
    resolve:
        Returns the object of a reference by its number.

    Raises
    ------
    Exception
        Of any kind, where it is none.
    """
    if isinstance(value, list):
        return _READERS[value[0]](value[1:], resolve)
    if isinstance(value, dict):
        raise ValueError("an object of JSON has no value")
    return value
