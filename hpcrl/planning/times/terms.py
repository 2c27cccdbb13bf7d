"""Times with their origin: each term has a name, a formula, its inputs and a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from hpcrl.errors import ConfigError
from hpcrl.planning.ledger import Table, Term

Seconds: TypeAlias = Term[float | None]


class TimeTable(Table[float | None]):
    """The terms of one activity."""

    __slots__ = ()

    @property
    def seconds(self) -> float | None:
        """Return the sum of the terms that count; None where one is unknown."""
        values = [term.value for term in self.terms if term.counts]
        if any(value is None for value in values):
            return None
        return sum(value for value in values if value is not None)

    @property
    def known_seconds(self) -> float:
        """Return the sum of the terms that are known: a lower bound where one is missing."""
        return sum(term.value or 0.0 for term in self.terms if term.counts)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the numbers that are missing, each once."""
        return tuple(dict.fromkeys(term.missing for term in self.terms if term.missing))


def attempt(
    name: str,
    compute: Callable[[], float],
    formula: str,
    inputs: Mapping[str, float | str] | None = None,
    *,
    counts: bool = True,
) -> Seconds:
    """Return a term; where the cluster profile lacks its number, it is unknown and names the missing one."""
    try:
        seconds = compute()
    except ConfigError as error:
        missing = ", ".join(finding.key for finding in error.findings)
        return Term(name, None, formula, inputs or {}, counts=counts, missing=missing)
    return Term(name, seconds, formula, inputs or {}, counts=counts)
