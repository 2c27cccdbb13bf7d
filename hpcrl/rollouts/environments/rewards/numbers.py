r"""Numbers in a text as people and models write them: ``1,234.5``, ``$42``, ``-7``, ``3/4``, ``\frac{3}{4}``, ``1e-3``.

A sign of currency, a percent sign and the exponent of a unit are not part of a number: 50 % is 50, 12 cm^2 is 12.
``1\frac{1}{2}`` and ``1 1/2`` are mixed numbers. Numbers are exact decimals, a quotient is rounded to some thousand
digits.
"""

from __future__ import annotations

import decimal
import re
import unicodedata
from decimal import Decimal

_MAX_DIGITS = 1000
"""Maximum number of characters of a number; longer ones are not compared, which would be slow."""
# no ambiguity between the alternatives: the time is linear in the length of the text
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_PLAIN = rf"(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}}(?!\d))?"
_BLANK = r"[^\S\n]"
"""What may be within a number: its parts are in one line."""
# a minus after a digit, a letter or a bracket is a subtraction, not a sign; so is one between blanks, and one at the
# begin of a line that a blank follows is the mark of a list
_SIGN = (
    rf"(?:(?<![\w)\]}}])(?:[-+]|(?<![\w)\]}}]\s)(?<!\n)(?<!\n\s)(?<!\n\s\s)(?<!\n\s\s\s)[-+]{_BLANK}))?"
    r"[$€£]?(?<![\d.])"
)
_NUMBER = re.compile(
    rf"{_SIGN}(?:\d+{_BLANK}(?=\d+{_BLANK}?/{_BLANK}?\d))?(?:{_PLAIN})(?:{_BLANK}?/{_BLANK}?(?:{_PLAIN}))?", re.ASCII
)
_MIXED = re.compile(r"([-+]?)(\d+)\s(\d+)\s?/\s?(\d+)", re.ASCII)
_PART = r"(?:\{(-?[\d.,]+)\}|(\d))"
_FRACTION = re.compile(rf"(\d?)\s?\\[dt]?frac\s?{_PART}\s?{_PART}", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d)(?:[\u00a0\u2007\u2009\u202f'’~]|\\ )(?=\d{3}(?!\d))", re.ASCII)
_LATEX_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;:]|\{,\})(?=\d{3}(?!\d))", re.ASCII)
_BLANK_THOUSANDS = re.compile(r"(?:(?<=[{$])|\A)([-+]?\d{1,3}(?: \d{3})+)(?=[}$.]|\Z)", re.ASCII)
"""A number with blanks that is alone; in a sentence these may be two numbers."""
_VULGAR = re.compile(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])")
_RAISED = re.compile(r"[\u00b9\u00b2\u00b3\u2070\u2074-\u2079\u207b]+")
_EXPONENT = r"\s?(?:\^|\*\*)\s?\{?([-+]?\d{1,3})\}?(?!\d)"
_POWERS = (
    (re.compile(rf"(?<=\d)\s?(?:×|\\times|\\cdot|·|\*|x)\s?10{_EXPONENT}", re.ASCII), r"e\1"),
    (re.compile(rf"(?<![\w.^{{}})])10{_EXPONENT}", re.ASCII), r"1e\1"),
    # exponents of units
    (re.compile(rf"(?<=[A-Za-z}}]){_EXPONENT}", re.ASCII), ""),
    (re.compile(r"(?<=\d)(\s?(?:[mcdk]?m|ft|in))[23]\b", re.ASCII), r"\1"),
)
_MARKUP = re.compile(
    r"\^\s?\{?\\(?:circ|degree)\}?|\\(?:(?:text|textbf|textrm|mathrm|mathbf|boxed|fbox|displaystyle|quad|degree|circ|left|right)(?![A-Za-z])|[^A-Za-z])"
)
"""Commands of LaTeX that change no value."""
_EQUATION = re.compile(r"\A\W{0,4}[A-Za-z]\w{0,8}\s?(?:=|≈)")
_VARIABLES = "abeijknpwxyz"
_EXPRESSION = re.compile(
    rf"(?<![A-Za-z])(?:[{_VARIABLES}]\s?(?:\^|\*\*)|(?<=\d)[eijnxyz](?![A-Za-z]|[-+]?\d))|\{{[\d.,]+\}}\s?\^|[√∛π]"
    r"|(?<![A-Za-z])(?:sqrt|pi|log|ln|sin|cos|tan|exp)(?![A-Za-z])"
)
"""Parts of an expression whose value is not that of the last number in it."""
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
    found = re.sub(r"(?<=[-+])\s|[,$€£]", "", found)
    if (mixed := _MIXED.fullmatch(found)) and int(mixed[3]) < int(mixed[4]):
        whole, part = Decimal(mixed[2]), _CONTEXT.divide(Decimal(mixed[3]), Decimal(mixed[4]))
        return _CONTEXT.multiply(Decimal(f"{mixed[1]}1"), _CONTEXT.add(whole, part))
    found = _MIXED.sub(r"\3/\4", found)
    numerator, _, denominator = re.sub(r"\s", "", found).partition("/")
    try:
        value = Decimal(numerator)
        return _CONTEXT.divide(value, Decimal(denominator)) if denominator else value
    except decimal.DecimalException:
        return None


def not_one_number(text: str) -> str:
    """Return why the last number of a text is not its value, as the end of a sentence; empty where it is.

    Words, units, signs of currency and the name of a variable in front (``x = 5``) may be there.
    """
    plain = _EQUATION.sub(" ", _MARKUP.sub(" ", _plain(text)))
    found = list(_NUMBER.finditer(plain))
    if not found:
        return ""
    rest = f"{plain[: found[-1].start()]} {plain[found[-1].end() :]}"
    if any(each.isdigit() for each in rest):
        return "has more than one number"
    if command := re.search(r"\\[A-Za-z]+", rest):
        return f"has {command[0]}, which numeric does not read"
    return "is an expression, and no number" if _EXPRESSION.search(text) or re.search(r"[+*×÷^]", rest) else ""


def same_number(number: Decimal, truth: Decimal, *, absolute: float, relative: float) -> bool:
    """Return whether two numbers are equal within the larger of two tolerances, one a share of ``truth``."""
    difference = _CONTEXT.abs(_CONTEXT.subtract(number, truth))
    share = _CONTEXT.multiply(Decimal(repr(relative)), _CONTEXT.abs(truth))
    return difference <= max(Decimal(repr(absolute)), share)


def without_thousands(text: str) -> str:
    r"""Return a text whose numbers have no ``\,`` or apostrophes between thousands, and a number alone no blanks."""
    text = _LATEX_THOUSANDS.sub("", _THOUSANDS.sub("", text))
    return _BLANK_THOUSANDS.sub(lambda number: number[1].replace(" ", ""), text)


def _plain(text: str) -> str:
    """Return a text with digits, signs, fractions and powers of ten in plain characters."""
    text = _RAISED.sub(lambda raised: f"^{raised[0]}", _VULGAR.sub(" ", without_thousands(text)))
    text = unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").replace("\N{FRACTION SLASH}", "/")
    # thousands in LaTeX
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")
    for power, plain in _POWERS:
        text = power.sub(plain, text)
    return _FRACTION.sub(_quotient, text)


def _quotient(fraction: re.Match[str]) -> str:
    digit, numerator, short_numerator, denominator, short_denominator = fraction.groups()
    between = f"{digit} " if digit else ""
    return f"{between}{numerator or short_numerator}/{denominator or short_denominator}"
