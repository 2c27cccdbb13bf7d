"""Comparison of recomputed rewards with those that a run was trained on: the changes in each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

_TOLERANCE = 1e-9
"""Largest difference of rewards, relative to the larger one where that is above 1, that is none: a reward computed
again adds up in another order."""


class RescoredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout and its reward computed again.

    Attributes
    ----------
    state, step:
        As in the ledger: ``trained`` with the step of its batch, ``waiting`` or ``dropped``.
    before:
        The reward that it was given; None where it was not finite.
    after:
        None where it is not known, or computing it failed.
    parts:
        Parts of ``after``.
    unknown:
        Reason why it cannot be computed: an input is not stored.
    failed:
        Error of the environment or the checker.
    """

    group: int
    member: int
    environment: str
    prompt_index: int
    state: str
    step: int | None
    before: float | None
    after: float | None = None
    parts: dict[str, float] = {}
    unknown: str = ""
    failed: str = ""

    @property
    def id(self) -> str:
        """Return the name ``GROUP/MEMBER``."""
        return f"{self.group}/{self.member}"

    @property
    def both(self) -> tuple[float, float] | None:
        """Return both rewards; None where one of them is not known."""
        return None if self.before is None or self.after is None else (self.before, self.after)


class RescoredStep(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of rewards in the batch of a step, or for rollouts that are in no batch.

    Attributes
    ----------
    state:
        ``trained``, ``waiting`` or ``dropped``; ``step`` is None for the last two.
    known:
        Number of rollouts with both rewards. All numbers below are of these alone.
    unknown, failed:
        Numbers of rollouts whose reward cannot be computed again, and of those for which that failed.
    changed:
        Number of rollouts whose reward differs.
    groups:
        Number of groups with at least two known rollouts.
    reordered:
        Number of groups in which a pair of rollouts is in another order, or is tied where it was not.
    varied_before, varied_after:
        Numbers of groups whose rewards differ; the others carry no gradient.
    """

    state: str
    step: int | None
    rollouts: int
    known: int
    unknown: int
    failed: int
    mean_before: float | None
    mean_after: float | None
    changed: int
    groups: int
    reordered: int
    varied_before: int
    varied_after: int


def same_reward(one: float, other: float) -> bool:
    """Return whether two rewards are equal but for rounding."""
    return abs(one - other) <= _TOLERANCE * max(1.0, abs(one), abs(other))


def rescored_steps(rollouts: Iterable[RescoredRollout]) -> list[RescoredStep]:
    """Summarise by step, ascending; rollouts that were dropped or wait come last."""
    found: dict[tuple[str, int | None], list[RescoredRollout]] = {}
    for rollout in rollouts:
        key = (rollout.state, rollout.step if rollout.state == "trained" else None)
        found.setdefault(key, []).append(rollout)
    order = sorted(found, key=lambda key: (key[1] is None, key[1] or 0, key[0]))
    return [_step(*key, found[key]) for key in order]


def _step(state: str, step: int | None, rollouts: Sequence[RescoredRollout]) -> RescoredStep:
    pairs = [both for each in rollouts if (both := each.both) is not None]
    by_group: dict[int, list[tuple[float, float]]] = {}
    for each in rollouts:
        if (both := each.both) is not None:
            by_group.setdefault(each.group, []).append(both)
    groups = [group for group in by_group.values() if len(group) > 1]
    return RescoredStep(
        state=state,
        step=step,
        rollouts=len(rollouts),
        known=len(pairs),
        unknown=sum(bool(each.unknown) for each in rollouts),
        failed=sum(bool(each.failed) for each in rollouts),
        mean_before=sum(before for before, _ in pairs) / len(pairs) if pairs else None,
        mean_after=sum(after for _, after in pairs) / len(pairs) if pairs else None,
        changed=sum(not same_reward(*pair) for pair in pairs),
        groups=len(groups),
        reordered=sum(map(_reordered, groups)),
        varied_before=sum(_varies([before for before, _ in group]) for group in groups),
        varied_after=sum(_varies([after for _, after in group]) for group in groups),
    )


def _reordered(group: Sequence[tuple[float, float]]) -> bool:
    return any(_order(one[0], other[0]) != _order(one[1], other[1]) for one, other in itertools.combinations(group, 2))


def _varies(rewards: Sequence[float]) -> bool:
    return any(not same_reward(rewards[0], reward) for reward in rewards[1:])


def _order(one: float, other: float) -> int:
    return 0 if same_reward(one, other) else 1 if one > other else -1
