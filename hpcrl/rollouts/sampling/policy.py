"""Decisions about groups: which may start, are kept, consumed and dropped; used by the scheduler and its simulation.

It counts places (`hpcrl.rollouts.core.staleness`) and starts nothing itself, so that `hpcrl simulate` decides as
runs do.

In deterministic order a run can be replayed, independent of timing. Weights of version ``v`` begin groups until ``(η +
v + 1)·B`` of them have been kept or consumed, and other weights are taken only when these have ended. So the groups
that a version begins are a function of their outcomes, which are a function of weights and seeds; none is sampled by
two versions, none becomes too old, and batches take them in the order in which they were begun. Waiting for the last of
them is expensive. So engines load only every ``(η + 1) / 2``-th version, and the batches of such an interval share one
wait; they have half of the permitted staleness when the trainer reaches them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol, TypeVar

from hpcrl.rollouts.core.staleness import StalenessAccount


class GroupOutcome(Enum):
    """Outcome of a group whose members have all ended."""

    KEPT = "kept"
    TOO_FEW = "too few"
    """Too few members to compare rewards."""
    STALE = "stale"
    NO_VARIANCE = "no variance"
    """All rewards are equal, and the recipe drops such groups."""


class _Aged(Protocol):
    @property
    def index(self) -> int: ...

    @property
    def version(self) -> int | None: ...


_Group = TypeVar("_Group", bound=_Aged)


class GroupAdmission:
    """Decides by the account, and records its decisions there."""

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
        """Return whether a group should start, given the rollouts in flight and their limit."""
        # in deterministic order waiting groups do not age: other weights are loaded only when these groups have ended
        place = self._capacity > 0 if self._in_order else self.account.may_start
        return in_flight + self._group_size <= limit and place

    @property
    def needs_newer_version(self) -> bool:
        """Return whether the staleness bound lets no group begin until engines serve a newer version."""
        return (self._capacity if self._in_order else self.account.capacity) <= 0

    @property
    def used_up(self) -> bool:
        """Return whether all groups have ended that the served weights may begin; only in deterministic order."""
        return self._in_order and self.account.running == 0 and self._capacity <= 0

    def choose(self, published: int) -> int:
        """Return the version that engines should serve now, where ``published`` is the newest."""
        if not self._in_order:
            return published
        following = self._turn + self._stride
        return following if self.used_up and following <= published else self.account.version

    @property
    def _turn(self) -> int:
        """Return the version whose groups are being begun; a resume may serve one that engines would have skipped."""
        return self.account.version - self.account.version % self._stride

    @property
    def _capacity(self) -> int:
        return self.account.capacity_of(self._turn)

    def end(self, *, members: int, version: int | None, has_variance: bool) -> GroupOutcome:
        """Decide on a group that has ended, update the account and return the decision.

        Parameters
        ----------
        members:
            Rollouts that did not fail.
        version:
            Version of the oldest first token.
        """
        if members < min(2, self._group_size) or version is None:
            fate = GroupOutcome.TOO_FEW
        elif self.is_stale(version):
            fate = GroupOutcome.STALE
        elif self._drops_equal and not has_variance:
            fate = GroupOutcome.NO_VARIANCE
        else:
            self.account.finish()
            return GroupOutcome.KEPT
        self.account.drop_running()
        return fate

    def may_take(self, running: Iterable[tuple[int, int | None]], finished: Iterable[_Aged]) -> bool:
        """Return whether the next step may take its groups now.

        While the previous step is trained, taking must not discard work: where a group in flight would become too old
        by it and might still be used in the same batch, the step waits until the trainer waits. In deterministic order,
        no group that was begun before the last group of the batch may still run.

        Parameters
        ----------
        running:
            Index of each group in flight or to be started again, and version of its oldest first token; None before its
            first token.
        finished:
            Groups that wait.
        """
        account = self.account
        if not account.batch_ready:
            return False
        if self._in_order:
            return not self.must_wait_for_unfinished((index for index, _ in running), finished)
        # taking a step makes groups of the oldest version that is usable now too old, so none of them may be in flight
        return not account.takes_ahead or all(v is None or v > account.oldest_usable for _, v in running)

    def must_wait_for_unfinished(self, unfinished: Iterable[int], finished: Iterable[_Aged]) -> bool:
        """Return whether the next step must wait for an unfinished group, whatever else has finished."""
        indices = sorted(group.index for group in finished)
        if len(indices) < self._groups_per_step:
            return True
        last = indices[self._groups_per_step - 1]
        return self._in_order and any(index < last for index in unfinished)

    def take(self, finished: Iterable[_Group]) -> list[_Group]:
        """Take the groups of the next step and return them.

        In deterministic order these are the groups that were begun first; else the oldest versions first, in index
        order.
        """
        self.account.consume()
        return sorted(finished, key=_index if self._in_order else _age)[: self._groups_per_step]

    def is_stale(self, version: int | None) -> bool:
        """Return whether a group can never be used again; a group without a token is not stale."""
        return version is not None and version < self.account.oldest_usable


def _index(group: _Aged) -> int:
    return group.index


def _age(group: _Aged) -> tuple[int, int]:
    assert group.version is not None
    return group.version, group.index
