"""What becomes of groups: which may start, which are kept, taken and given up. The scheduler and its simulation ask it.

It counts places (`hpcrl.rollouts.sampling.staleness`) and starts nothing itself, so that `hpcrl simulate` cannot drift
from what runs do.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol, TypeVar

from hpcrl.rollouts.sampling.staleness import StalenessAccount

__all__ = ["Fate", "GroupPolicy"]


class Fate(Enum):
    """Of a group whose members have all ended."""

    KEPT = "kept"
    TOO_FEW = "too few"
    """Members to compare rewards with."""
    STALE = "stale"
    NO_VARIANCE = "no variance"
    """All rewards are equal, and the recipe drops such groups."""


class _Aged(Protocol):
    @property
    def index(self) -> int: ...

    @property
    def version(self) -> int | None: ...


_Group = TypeVar("_Group", bound=_Aged)


class GroupPolicy:
    """Decides by the account, and books in it what it decides."""

    def __init__(self, account: StalenessAccount, *, group_size: int, groups_per_step: int, zero_variance: str) -> None:
        """Decide for groups of ``group_size`` rollouts; ``zero_variance`` is that of the recipe."""
        self.account = account
        self._group_size, self._groups_per_step = group_size, groups_per_step
        self._drops_equal = zero_variance == "drop"

    def may_start(self, in_flight: int, limit: int) -> bool:
        """Whether a group should start beside so many rollouts, of which ``limit`` may run."""
        return in_flight + self._group_size <= limit and self.account.may_start

    def end(self, *, members: int, version: int | None, has_variance: bool) -> Fate:
        """What becomes of a group; its place is booked.

        Parameters
        ----------
        members:
            Rollouts that did not fail.
        version:
            Of its oldest first token.
        """
        if members < min(2, self._group_size) or version is None:
            fate = Fate.TOO_FEW
        elif self.is_stale(version):
            fate = Fate.STALE
        elif self._drops_equal and not has_variance:
            fate = Fate.NO_VARIANCE
        else:
            self.account.finish()
            return Fate.KEPT
        self.account.drop_running()
        return fate

    def may_take(self, running: Iterable[int | None]) -> bool:
        """Whether the next step may take its groups now.

        While the step before is trained, that must cost nothing: where a group in flight would become too old by it,
        and might still be used in the very batch, the trainer's own wait comes first.

        Parameters
        ----------
        running:
            Version of the oldest first token of each group in flight; None where nobody has asked yet.
        """
        account = self.account
        if not account.batch_ready:
            return False
        # taking a step makes groups of the oldest version that is usable now too old
        return not account.takes_ahead or all(v is None or v > account.oldest_usable for v in running)

    def take(self, finished: Iterable[_Group]) -> list[_Group]:
        """The groups of the next step: the oldest versions first, in index order."""
        self.account.consume()
        return sorted(finished, key=_age)[: self._groups_per_step]

    def is_stale(self, version: int | None) -> bool:
        """Whether a group can never be used again; one that has no token yet can."""
        return version is not None and version < self.account.oldest_usable


def _age(group: _Aged) -> tuple[int, int]:
    assert group.version is not None
    return group.version, group.index
