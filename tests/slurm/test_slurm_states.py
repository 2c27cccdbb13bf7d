"""States by word, list and component."""

from __future__ import annotations

import pytest

from hpcrl.slurm.states import JobState, fold_states, parse_state

S = JobState


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("RUNNING", S.RUNNING),
        (["RUNNING"], S.RUNNING),
        ("CANCELLED by 1000", S.CANCELLED),
        ("CANCELLED+", S.CANCELLED),
        (["COMPLETED", "COMPLETING"], S.COMPLETING),
        ("COMPLETED,COMPLETING", S.COMPLETING),
        (["PENDING", "REQUEUED"], S.REQUEUED),
        (["RUNNING", "CONFIGURING"], S.CONFIGURING),
        (["PENDING", "REQUEUE_HOLD"], S.REQUEUE_HOLD),
        (["FAILED", "LAUNCH_FAILED"], S.FAILED),
        (["NODE_FAIL", "SOMETHING_OF_2031"], S.NODE_FAIL),
        (["EXPEDITING", "PENDING"], S.REQUEUED),
        ("SIGNALING", S.RUNNING),
        # one word of several is an end, and the job is not over, or no success
        ("COMPLETED,SIGNALING", S.RUNNING),
        (["COMPLETED", "LAUNCH_FAILED"], S.FAILED),
        (["COMPLETED", "RECONFIG_FAIL"], S.FAILED),
        ("SOMETHING_OF_2031", S.UNKNOWN),
        ("", S.UNKNOWN),
        ([], S.UNKNOWN),
        (None, S.UNKNOWN),
    ],
)
def test_parse(words: str | list[str] | None, state: JobState) -> None:
    assert parse_state(words) is state


def test_every_state_is_of_one_kind() -> None:
    for state in S:
        assert state.waiting + state.holding + state.ended == (state is not S.UNKNOWN)


@pytest.mark.parametrize(
    ("states", "folded"),
    [
        ([S.COMPLETED, S.COMPLETED], S.COMPLETED),
        ([S.COMPLETED, S.FAILED], S.FAILED),
        ([S.FAILED, S.COMPLETED], S.FAILED),
        # the batch script dies of the node's failure: the failure is the cause
        ([S.FAILED, S.NODE_FAIL], S.NODE_FAIL),
        ([S.CANCELLED, S.PREEMPTED], S.PREEMPTED),
        # one component was cancelled, the job goes on
        ([S.RUNNING, S.CANCELLED], S.RUNNING),
        ([S.COMPLETED, S.COMPLETING], S.COMPLETING),
        ([S.COMPLETING, S.PENDING], S.COMPLETING),
        ([S.PENDING, S.PENDING], S.PENDING),
        ([S.COMPLETED, S.UNKNOWN], S.UNKNOWN),
        ([S.RUNNING, S.UNKNOWN], S.RUNNING),
        ([], S.UNKNOWN),
    ],
)
def test_fold(states: list[JobState], folded: JobState) -> None:
    assert fold_states(states) is folded


def test_missing_component_is_not_an_end() -> None:
    assert fold_states([S.COMPLETED], expected=2) is S.UNKNOWN
    assert fold_states([S.RUNNING], expected=2) is S.RUNNING
    assert fold_states([S.COMPLETED, S.COMPLETED], expected=2) is S.COMPLETED
