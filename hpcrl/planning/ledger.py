"""Amounts with the formula and the numbers they come from: what ``hpcrl plan --explain`` prints.

A term is bytes of memory in a `Ledger`, and seconds in a `hpcrl.planning.times.terms.TimeTable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic

from typing_extensions import TypeVar

GIB = 1 << 30
Value = TypeVar("Value", int, float | None, default=int)


@dataclass(frozen=True, slots=True)
class Term(Generic[Value]):
    """Amount in bytes, or in seconds (``float | None``).

    Attributes
    ----------
    name:
        Name; docs/planning.md has an entry of the same name.
    value:
        Bytes or seconds; None where a number is missing.
    formula:
        In the symbols of ``inputs``.
    inputs:
        Value of each symbol.
    source:
        Source of the formula, in a few words: ``counted``, ``measured``, ``assumed``, or a reference.
    counts:
        False for amounts that are shown and not summed: page cache, which the kernel drops when memory is short, and
        work that overlaps with longer work.
    missing:
        Name of the missing number, where ``value`` is None.
    """

    name: str
    value: Value
    formula: str
    inputs: Mapping[str, float | str] = field(default_factory=dict)
    source: str = "counted"
    counts: bool = True
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Table(Generic[Value]):
    """Terms of one moment or activity.

    Attributes
    ----------
    name:
        Name of the moment or the activity.
    terms:
        In the order of the documentation.
    """

    name: str
    terms: tuple[Term[Value], ...]

    def __getitem__(self, name: str) -> Term[Value]:
        """Return the term of a name (KeyError where there is none)."""
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(name)

    def __iter__(self) -> Iterator[Term[Value]]:
        return iter(self.terms)


class Ledger(Table[int]):
    """The terms that are in memory at one moment, ``name``; those of zero bytes are left out."""

    __slots__ = ()

    @classmethod
    def of(cls, moment: str, terms: Iterable[Term | None]) -> Ledger:
        """Return a ledger without empty terms."""
        return cls(moment, tuple(term for term in terms if term is not None and term.value > 0))

    @property
    def total(self) -> int:
        """Return the bytes that cannot be freed."""
        return sum(term.value for term in self.terms if term.counts)

    @property
    def largest(self) -> Term:
        """Return the term that binds (ValueError for an empty ledger)."""
        return max((term for term in self.terms if term.counts), key=lambda term: term.value)


def explain(term: Term) -> str:
    """Return a text like ``name: GiB = formula with symbol = number, …``."""
    given = ", ".join(f"{name} = {_number(value)}" for name, value in term.inputs.items())
    where = f" with {given}" if given else ""
    return f"{term.name}: {term.value / GIB:.2f} GiB = {term.formula}{where} [{term.source}]"


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"
