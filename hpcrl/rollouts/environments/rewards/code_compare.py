"""Compares what a function has returned with what a row expects (see `code_judge`, next to this file).

Python 3.8 reads this file.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

_RELATIVE = 1e-5
_ABSOLUTE = 1e-8
"""Tolerances of floating-point numbers: those of ``numpy.allclose``, which the grader of APPS calls. Rows have numbers
that were rounded to five decimals."""


def same_value(found: Any, expected: Any) -> bool:
    """Return whether a value is the expected one.

    Only the type of the expected value decides how the two are compared. A list is equal to a tuple. Numbers have a
    tolerance where the expected one is a float: two large whole numbers are otherwise equal that differ by one. Keys
    that are whole numbers are equal to their digits, because JSON has no other keys than text.

    Parameters
    ----------
    found:
        Plain data, or a reference, which is equal to nothing.
    expected:
        Value of JSON.
    """
    if isinstance(expected, list):
        if not isinstance(found, (list, tuple)) or len(found) != len(expected):
            return False
        return all(same_value(one, other) for one, other in zip(found, expected))  # noqa: B905 - Python 3.8
    if isinstance(expected, dict):
        return _same_items(found, expected)
    if isinstance(expected, float):
        return isinstance(found, (int, float, Decimal, Fraction)) and _close(float(found), expected)
    if isinstance(expected, int):
        return isinstance(found, (int, float, Decimal, Fraction)) and bool(found == expected)
    return type(found) is type(expected) and bool(found == expected)


def _same_items(found: Any, expected: dict[str, Any]) -> bool:
    if not isinstance(found, dict) or len(found) != len(expected):
        return False
    by_text = {str(key) if type(key) is int else key: value for key, value in found.items()}
    return by_text.keys() == expected.keys() and all(same_value(by_text[key], expected[key]) for key in expected)


def _close(found: float, expected: float) -> bool:
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return True
    # an infinite tolerance would be one for every number
    return abs(found - expected) <= _ABSOLUTE + _RELATIVE * abs(expected) < math.inf
