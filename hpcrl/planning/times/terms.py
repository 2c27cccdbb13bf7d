"""Times with their origin: each term has a name, a formula, its inputs and a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hpcrl.errors import ConfigError

__all__ = ["TimeTable", "TimeTerm"]


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """One part of a time.

    Attributes
    ----------
    name:
        What it is, for example ``fsdp.gather``.
    seconds:
        None where a number is missing.
    formula:
        As in docs/planning.md, in words and letters.
    inputs:
        The values in it.
    counts:
        False for what runs beside something longer and is in no sum.
    missing:
        Which number is missing, where ``seconds`` is None.
    """

    name: str
    seconds: float | None
    formula: str
    inputs: Mapping[str, float | str] = field(default_factory=dict)
    counts: bool = True
    missing: str = ""


@dataclass(frozen=True, slots=True)
class TimeTable:
    """The terms of one activity."""

    name: str
    terms: tuple[TimeTerm, ...]

    @property
    def seconds(self) -> float | None:
        """Sum of the terms that count; None where one is unknown."""
        values = [term.seconds for term in self.terms if term.counts]
        if any(value is None for value in values):
            return None
        return sum(value for value in values if value is not None)

    @property
    def known_seconds(self) -> float:
        """Sum of the terms that are known: a lower bound where one is missing."""
        return sum(term.seconds or 0.0 for term in self.terms if term.counts)

    @property
    def missing(self) -> tuple[str, ...]:
        """Numbers that are missing, each once."""
        return tuple(dict.fromkeys(term.missing for term in self.terms if term.missing))

    def term(self, name: str) -> TimeTerm:
        """The term of a name (KeyError where there is none)."""
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(name)

    def __iter__(self) -> Iterator[TimeTerm]:
        return iter(self.terms)


def attempt(
    name: str,
    compute: Callable[[], float],
    formula: str,
    inputs: Mapping[str, float | str] | None = None,
    *,
    counts: bool = True,
) -> TimeTerm:
    """A term whose value may need a number that the cluster profile lacks: then it is unknown, and says which one."""
    try:
        seconds = compute()
    except ConfigError as error:
        missing = ", ".join(finding.key for finding in error.findings)
        return TimeTerm(name, None, formula, inputs or {}, counts, missing)
    return TimeTerm(name, seconds, formula, inputs or {}, counts)
