"""What becomes of groups: which may start, which are kept, taken and given up. The scheduler and its simulation ask it.

It counts places (`hpcrl.rollouts.sampling.staleness`) and starts nothing itself, so that `hpcrl simulate` cannot drift
from what runs do.

In deterministic order a run can be replayed, whatever takes how long. Weights of version ``v`` begin groups until
``(η + v + 1)·B`` of them have been kept or consumed, and other weights are taken only when these have ended. So the
groups that a version begins are a function of what becomes of them, which is a function of weights and seeds; none is
sampled by two versions, none becomes too old, and batches take them in the order in which they were begun. To wait for
the last of them is dear, so engines take every ``(η + 1) / 2``-th version, and a wait is shared by so many batches,
half as old as they may be when the trainer comes to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol, TypeVar

from hpcrl.rollouts.sampling.staleness import StalenessAccount

__all__ = ["Fate", "GroupPolicy"]


class Fate(Enum):
    """What becomes of a group whose members have all ended."""

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

    def __init__(
        self,
        account: StalenessAccount,
        *,
        group_size: int,
        groups_per_step: int,
        zero_variance: str,
        order: str = "arrival",
    ) -> None:
        """Decide for groups of ``group_size`` rollouts; ``zero_variance`` and ``order`` are those of the recipe."""
        self.account, self._in_order = account, order == "deterministic"
        self._stride = max(1, (account.bound + 1) // 2)
        self._group_size, self._groups_per_step = group_size, groups_per_step
        self._drops_equal = zero_variance == "drop"

    def may_start(self, in_flight: int, limit: int) -> bool:
        """Whether a group should start beside so many rollouts, of which ``limit`` may run."""
        # in order, what waits becomes no older: other weights are not taken before
        place = self._capacity > 0 if self._in_order else self.account.may_start
        return in_flight + self._group_size <= limit and place

    @property
    def used_up(self) -> bool:
        """Whether all groups have ended that the weights served may begin; only in deterministic order."""
        return self._in_order and self.account.running == 0 and self._capacity <= 0

    def choose(self, published: int) -> int:
        """The version that engines should serve now, where ``published`` is the newest."""
        if not self._in_order:
            return published
        following = self._turn + self._stride
        return following if self.used_up and following <= published else self.account.version

    @property
    def _turn(self) -> int:
        """The version whose groups are being begun: a resume may serve one that engines would have left out."""
        return self.account.version - self.account.version % self._stride

    @property
    def _capacity(self) -> int:
        return self.account.capacity_of(self._turn)

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

    def may_take(self, running: Iterable[tuple[int, int | None]], finished: Iterable[_Aged]) -> bool:
        """Whether the next step may take its groups now.

        While the step before is trained, that must cost nothing: where a group in flight would become too old by it,
        and might still be used in the very batch, the trainer's own wait comes first. In deterministic order, no group
        may still run that was begun before the last of the batch.

        Parameters
        ----------
        running:
            Index of each group in flight, or to be started again, and version of its oldest first token; None where
            nobody has asked yet.
        finished:
            Groups that wait.
        """
        account = self.account
        if not account.batch_ready:
            return False
        if self._in_order:
            return not self.lacks((index for index, _ in running), finished)
        # taking a step makes groups of the oldest version that is usable now too old
        return not account.takes_ahead or all(v is None or v > account.oldest_usable for _, v in running)

    def lacks(self, unfinished: Iterable[int], finished: Iterable[_Aged]) -> bool:
        """Whether the next step must wait for one of the unfinished groups, whatever else has finished."""
        indices = sorted(group.index for group in finished)
        if len(indices) < self._groups_per_step:
            return True
        last = indices[self._groups_per_step - 1]
        return self._in_order and any(index < last for index in unfinished)

    def take(self, finished: Iterable[_Group]) -> list[_Group]:
        """The groups of the next step: those that were begun first, where the order is deterministic; else the oldest
        versions first, in index order."""
        self.account.consume()
        return sorted(finished, key=_index if self._in_order else _age)[: self._groups_per_step]

    def is_stale(self, version: int | None) -> bool:
        """Whether a group can never be used again; one that has no token yet can."""
        return version is not None and version < self.account.oldest_usable


def _index(group: _Aged) -> int:
    return group.index


def _age(group: _Aged) -> tuple[int, int]:
    assert group.version is not None
    return group.version, group.index
