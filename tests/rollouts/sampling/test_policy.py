"""What becomes of groups: the decisions that scheduler and simulation share."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from hpcrl.rollouts.core.staleness import StalenessAccount
from hpcrl.rollouts.sampling.policy import GroupAdmission, GroupOutcome


class Waiting(NamedTuple):
    index: int
    version: int


def policy(*, group_size: int = 4, zero_variance: str = "drop", step: int = 5, waiting: int = 0) -> GroupAdmission:
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=2, step=step, waiting=waiting)
    return GroupAdmission(account, group_size=group_size, groups_per_step=2, zero_variance=zero_variance)


@pytest.mark.parametrize(
    ("members", "version", "has_variance", "fate"),
    [
        (4, 5, True, GroupOutcome.KEPT),
        (2, 3, True, GroupOutcome.KEPT),
        (1, 5, True, GroupOutcome.TOO_FEW),
        (0, None, False, GroupOutcome.TOO_FEW),
        # version 2 is more than two steps behind step 5
        (4, 2, True, GroupOutcome.STALE),
        (4, 2, False, GroupOutcome.STALE),
        (4, 5, False, GroupOutcome.NO_VARIANCE),
    ],
)
def test_the_fate_of_a_group_and_its_place(
    members: int, version: int | None, has_variance: bool, fate: GroupOutcome
) -> None:
    own = policy()
    own.account.start()
    assert own.end(members=members, version=version, has_variance=has_variance) is fate
    assert (own.account.running, own.account.waiting) == (0, fate is GroupOutcome.KEPT)


def test_equal_rewards_are_kept_where_the_recipe_keeps_them() -> None:
    own = policy(zero_variance="keep")
    own.account.start()
    assert own.end(members=4, version=5, has_variance=False) is GroupOutcome.KEPT


def test_whole_groups_start_below_the_limit() -> None:
    own = policy()
    assert own.may_start(0, 4)
    assert own.may_start(4, 8)
    assert not own.may_start(5, 8)


def test_in_the_order_of_arrival_nothing_starts_while_a_batch_waits() -> None:
    """In deterministic order what the version may begin begins all the same: it becomes no older."""
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=3, waiting=2)
    assert account.capacity > 0
    for order, starts in (("arrival", False), ("deterministic", True)):
        own = GroupAdmission(account, group_size=4, groups_per_step=2, zero_variance="keep", order=order)
        assert own.may_start(0, 4) is starts


def test_the_oldest_versions_are_taken_in_index_order() -> None:
    own = policy(waiting=3)
    waiting = [Waiting(7, 4), Waiting(2, 5), Waiting(3, 4)]
    assert own.take(waiting) == [Waiting(3, 4), Waiting(7, 4)]
    assert (own.account.step, own.account.waiting) == (6, 1)
    assert own.is_stale(3)
    assert not own.is_stale(4)
    assert not own.is_stale(None)


def test_in_order_a_version_begins_its_groups_and_hands_over_when_they_have_ended() -> None:
    """A bound of three steps: engines take every second version, which begins the groups of two batches."""
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=3)
    own = GroupAdmission(account, group_size=4, groups_per_step=2, zero_variance="drop", order="deterministic")
    for _ in range(8):
        assert own.may_start(0, 4)
        account.start()
    assert not own.may_start(0, 4)
    for left in range(8, 0, -1):
        assert (account.running, own.choose(5)) == (left, 0)
        own.end(members=4, version=0, has_variance=True)
    assert [own.choose(published) for published in (0, 1, 2, 5)] == [0, 0, 2, 2]
    # one that is dropped makes room for the next
    account.serve(2)
    for _ in range(4):
        account.start()
    own.end(members=4, version=2, has_variance=False)
    assert own.may_start(0, 4)


def test_in_order_a_resume_between_two_versions_continues_where_the_one_before_stopped() -> None:
    """At step 3 the groups of version 2 have been begun: those of version 4 are the next, and 3 begins none."""
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=3, step=3, waiting=6)
    own = GroupAdmission(account, group_size=4, groups_per_step=2, zero_variance="keep", order="deterministic")
    assert not own.may_start(0, 4)
    assert (own.choose(3), own.choose(4)) == (3, 4)


def test_in_order_no_batch_is_made_while_an_earlier_group_runs() -> None:
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=3, waiting=3)
    own = GroupAdmission(account, group_size=4, groups_per_step=2, zero_variance="keep", order="deterministic")
    waiting = [Waiting(7, 0), Waiting(2, 0), Waiting(5, 0)]
    assert not own.may_take([(4, None)], waiting)
    assert own.may_take([(6, 0)], waiting)
    assert own.take(waiting) == [Waiting(2, 0), Waiting(5, 0)]


@pytest.mark.parametrize(
    ("group_size", "members", "fate"),
    [(1, 1, GroupOutcome.KEPT), (1, 0, GroupOutcome.TOO_FEW), (2, 1, GroupOutcome.TOO_FEW)],
)
def test_a_group_of_one_is_not_compared(group_size: int, members: int, fate: GroupOutcome) -> None:
    own = policy(group_size=group_size)
    own.account.start()
    assert own.end(members=members, version=5, has_variance=True) is fate


def test_a_group_without_a_version_is_never_kept() -> None:
    own = policy()
    own.account.start()
    assert own.end(members=4, version=None, has_variance=True) is GroupOutcome.TOO_FEW


def test_a_batch_is_taken_when_it_is_whole() -> None:
    assert not policy(waiting=1).may_take([], [Waiting(1, 5)])
    waiting = [Waiting(1, 5), Waiting(2, 5)]
    # the trainer waits for it: what becomes too old by it is given up
    own = policy(waiting=2)
    assert own.may_take([(7, 3), (8, None)], waiting)


def test_a_batch_is_taken_ahead_only_where_nothing_that_runs_becomes_too_old() -> None:
    """At step 6 with a bound of two steps: version 4 is the oldest that it may use, and 5 the oldest after it."""
    own = policy(waiting=4)
    own.account.consume()
    assert own.account.takes_ahead
    assert own.account.oldest_usable == 4
    waiting = [Waiting(1, 5), Waiting(2, 5)]
    assert own.may_take([], waiting)
    assert own.may_take([(7, 5), (8, None)], waiting)
    assert not own.may_take([(7, 5), (8, 4)], waiting)
    own.account.settle(6)
    assert own.may_take([(7, 5), (8, 4)], waiting)


def test_a_batch_lacks_what_is_not_there_and_in_order_what_was_begun_before_it() -> None:
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=3)
    for order, earlier in (("arrival", False), ("deterministic", True)):
        own = GroupAdmission(account, group_size=4, groups_per_step=2, zero_variance="keep", order=order)
        assert own.must_wait_for_unfinished([], [Waiting(1, 0)])
        finished = [Waiting(9, 0), Waiting(1, 0), Waiting(5, 0)]
        assert own.must_wait_for_unfinished([0], finished) is earlier
        assert own.must_wait_for_unfinished([7, 4], finished) is earlier
        assert not own.must_wait_for_unfinished([6, 10], finished)
        assert not own.must_wait_for_unfinished([], finished)


@pytest.mark.parametrize(("bound", "following"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_in_order_engines_take_versions_half_as_far_apart_as_rollouts_may_be_old(bound: int, following: int) -> None:
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=bound)
    own = GroupAdmission(account, group_size=4, groups_per_step=2, zero_variance="keep", order="deterministic")
    while own.may_start(0, 4):
        account.start()
        own.end(members=4, version=0, has_variance=True)
    assert account.waiting == 2 * (bound + 1)
    assert own.used_up
    assert (own.choose(following - 1), own.choose(following), own.choose(9)) == (0, following, following)


def test_in_the_order_of_arrival_engines_take_the_newest_version_at_once() -> None:
    for own in (policy(), policy(waiting=6)):
        assert own.choose(9) == 9
        assert not own.used_up
    assert policy(waiting=6).account.capacity == 0


@pytest.mark.parametrize(
    ("waiting", "running", "used_up"), [(7, 0, False), (8, 0, True), (9, 0, True), (7, 1, False), (0, 8, False)]
)
def test_weights_are_used_up_when_all_groups_have_ended_that_they_may_begin(
    waiting: int, running: int, used_up: bool
) -> None:
    """Eight with a bound of three steps and two groups a step; a resume may bring more."""
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=3, waiting=waiting)
    for _ in range(running):
        account.start()
    own = GroupAdmission(account, group_size=4, groups_per_step=2, zero_variance="keep", order="deterministic")
    assert own.used_up is used_up
