"""Amounts with the formula and the numbers they come from: what ``hpcrl plan --explain`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["GIB", "Ledger", "Term"]

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Term:
    """One amount of memory.

    Attributes
    ----------
    name:
        What it is; docs/planning.md has an entry of the same name.
    value:
        Bytes.
    formula:
        In the symbols of ``inputs``.
    inputs:
        Value of each symbol.
    source:
        Where the formula comes from, in a few words: ``counted``, ``measured``, ``assumed``, or a reference.
    reclaimable:
        The kernel drops it when memory is short (page cache): shown, not summed.
    """

    name: str
    value: int
    formula: str
    inputs: Mapping[str, float | str] = field(default_factory=dict)
    source: str = "counted"
    reclaimable: bool = False

    @property
    def gib(self) -> float:
        """The amount in GiB."""
        return self.value / GIB

    def explain(self) -> str:
        """``name = value: formula with symbol = number, …``."""
        given = ", ".join(f"{name} = {_number(value)}" for name, value in self.inputs.items())
        where = f" with {given}" if given else ""
        return f"{self.name}: {self.gib:.2f} GiB = {self.formula}{where} [{self.source}]"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The terms that are in memory at one moment.

    Attributes
    ----------
    moment:
        When, in a few words.
    terms:
        In the order of the documentation; those of zero bytes are left out.
    """

    moment: str
    terms: tuple[Term, ...]

    @classmethod
    def of(cls, moment: str, terms: Iterable[Term | None]) -> Ledger:
        """A ledger without empty terms."""
        return cls(moment, tuple(term for term in terms if term is not None and term.value > 0))

    @property
    def total(self) -> int:
        """Bytes that cannot be given back."""
        return sum(term.value for term in self.terms if not term.reclaimable)

    @property
    def largest(self) -> Term:
        """The term that binds (ValueError for an empty ledger)."""
        return max((term for term in self.terms if not term.reclaimable), key=lambda term: term.value)

    def __getitem__(self, name: str) -> Term:
        """The term of a name (KeyError where there is none)."""
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(name)


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"
