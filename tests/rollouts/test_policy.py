"""What becomes of groups: the decisions that scheduler and simulation share."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from hpcrl.rollouts.sampling.policy import Fate, GroupPolicy
from hpcrl.rollouts.sampling.staleness import StalenessAccount


class Waiting(NamedTuple):
    index: int
    version: int


def policy(*, group_size: int = 4, zero_variance: str = "drop", step: int = 5, waiting: int = 0) -> GroupPolicy:
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=2, step=step, waiting=waiting)
    return GroupPolicy(account, group_size=group_size, groups_per_step=2, zero_variance=zero_variance)


@pytest.mark.parametrize(
    ("members", "version", "has_variance", "fate"),
    [
        (4, 5, True, Fate.KEPT),
        (2, 3, True, Fate.KEPT),
        (1, 5, True, Fate.TOO_FEW),
        (0, None, False, Fate.TOO_FEW),
        # version 2 is more than two steps behind step 5
        (4, 2, True, Fate.STALE),
        (4, 2, False, Fate.STALE),
        (4, 5, False, Fate.NO_VARIANCE),
    ],
)
def test_the_fate_of_a_group_and_its_place(members: int, version: int | None, has_variance: bool, fate: Fate) -> None:
    own = policy()
    own.account.start()
    assert own.end(members=members, version=version, has_variance=has_variance) is fate
    assert (own.account.running, own.account.waiting) == (0, fate is Fate.KEPT)


def test_equal_rewards_are_kept_where_the_recipe_keeps_them() -> None:
    own = policy(zero_variance="keep")
    own.account.start()
    assert own.end(members=4, version=5, has_variance=False) is Fate.KEPT


def test_whole_groups_start_below_the_limit() -> None:
    own = policy()
    assert own.may_start(0, 4)
    assert own.may_start(4, 8)
    assert not own.may_start(5, 8)


def test_the_oldest_versions_are_taken_in_index_order() -> None:
    own = policy(waiting=3)
    waiting = [Waiting(7, 4), Waiting(2, 5), Waiting(3, 4)]
    assert own.take(waiting) == [Waiting(3, 4), Waiting(7, 4)]
    assert (own.account.step, own.account.waiting) == (6, 1)
    assert own.is_stale(3)
    assert not own.is_stale(4)
    assert not own.is_stale(None)
