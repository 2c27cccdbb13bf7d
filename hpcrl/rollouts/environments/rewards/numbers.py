r"""Numbers in a text as people and models write them: ``1,234.5``, ``$42``, ``-7``, ``3/4``, ``\frac{3}{4}``, ``1e-3``.

A sign of currency and a percent sign are not part of a number: 50 % is 50. Numbers are exact decimals, a quotient is
rounded to some thousand digits.
"""

from __future__ import annotations

import decimal
import re
import unicodedata
from decimal import Decimal

__all__ = ["last_number_text", "number_of", "same_number"]

_MAX_DIGITS = 1000
"""A number of more characters is none: nothing compares it, and it takes long."""
# no ambiguity between the alternatives: the time is linear in the length of the text
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_PLAIN = rf"(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}}(?!\d))?"
# a minus behind a digit, a letter or a bracket takes away, and is no sign
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}])[-+]\s?)?[$€£]?(?<![\d.])(?:{_PLAIN})(?:\s?/\s?(?:{_PLAIN}))?", re.ASCII)
_FRACTION = re.compile(r"\\[dt]?frac\s?\{(-?[\d.,]+)\}\s?\{(-?[\d.,]+)\}", re.ASCII)
_CONTEXT = decimal.Context(prec=_MAX_DIGITS + 100, Emax=10**6, Emin=-(10**6))


def last_number_text(text: str) -> str | None:
    """Return the last number of a text in plain characters; None where there is none."""
    found = None
    for match in _NUMBER.finditer(_plain(text)):
        found = match[0]
    return found


def number_of(text: str) -> Decimal | None:
    """Return the value of the last number of a text; None where there is none."""
    found = last_number_text(text)
    if found is None or len(found) > _MAX_DIGITS:
        return None
    numerator, _, denominator = re.sub(r"[\s,$€£]", "", found).partition("/")
    try:
        value = Decimal(numerator)
        return _CONTEXT.divide(value, Decimal(denominator)) if denominator else value
    except decimal.DecimalException:
        return None


def same_number(number: Decimal, truth: Decimal, *, absolute: float, relative: float) -> bool:
    """Return whether two numbers are equal within the larger of two tolerances, one a share of ``truth``."""
    difference = _CONTEXT.abs(_CONTEXT.subtract(number, truth))
    share = _CONTEXT.multiply(Decimal(repr(relative)), _CONTEXT.abs(truth))
    return difference <= max(Decimal(repr(absolute)), share)


def _plain(text: str) -> str:
    """Return a text with digits, signs and fractions in plain characters."""
    text = unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").replace("\N{FRACTION SLASH}", "/")
    # thousands in LaTeX
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")
    return _FRACTION.sub(r"\1/\2", text)
