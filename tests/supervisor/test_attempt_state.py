"""Every way an attempt may end: what was seen and asked before, in any order, against the state that it ends in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.status import RunState
from hpcrl.supervisor.attempt.attempt_state import AttemptState

LAST = {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.REQUEUED}
#: what others may say before an attempt stops
SAYINGS = {
    "complete": lambda state: state.complete(),
    "fail": lambda state: state.fail(cause(CauseKind.EXIT)),
    "cancel": lambda state: state.cancel(killed_within_s=30.0),
    "warn": lambda state: state.warn(60.0),
    "leave": lambda state: state.leave("the job is about to end"),
    "blame": lambda state: state.add_node_faults({"n1": "its GPU fell off the bus"}),
    "ready": lambda state: state.running(),
}
CAUSES = (None, CauseKind.EXIT, CauseKind.CANCELLED, CauseKind.NODE_FAIL, CauseKind.PREEMPTED, CauseKind.NO_STEP)


def cause(kind: CauseKind) -> Cause:
    return Cause(kind=kind, time_s=1.0, message=f"it was {kind}")


class _Board:
    """Remembers what would be shown."""

    def __init__(self) -> None:
        self.shown: list[RunState] = []
        self.events: list[str] = []

    def enter(self, state: RunState, cause: Cause | None = None, *, because: str = "") -> None:
        self.shown.append(state)

    def emit(self, kind: str, **data: Any) -> None:
        self.events.append(kind)


def ways() -> list[tuple[str, ...]]:
    return [way for count in range(1, 4) for way in itertools.permutations(SAYINGS, count)]


def test_every_way_ends_in_one_last_state_that_says_what_happened() -> None:
    ended = dict.fromkeys(LAST, 0)
    for way, kind, moves, retries in itertools.product(ways(), CAUSES, (False, True), (False, True)):
        board = _Board()
        state = AttemptState(board)  # type: ignore[arg-type]
        for saying in way:
            SAYINGS[saying](state)
        assert state.is_decided() == bool({"complete", "fail", "cancel", "leave"} & set(way)), way
        if not state.is_decided():
            with pytest.raises(AssertionError, match="for a reason"):
                state.stop(None)
            continue
        found = None if kind is None else cause(kind)
        state.stop(found)
        state.moves = moves
        foreseen = state.outlook(found, retries=lambda _, retries=retries: retries)  # type: ignore[misc]
        again = state.conclude(found, retries=lambda _, retries=retries: retries)  # type: ignore[misc]
        ended[state.state] += 1
        assert foreseen == (state.state, again)
        told = (way, kind, moves, retries, state.state)
        assert state.state in LAST, told
        # nothing that failed looks like success, and nothing that did not fail looks like failure
        assert (state.state is RunState.COMPLETED) <= (kind is None), told
        assert (state.state in {RunState.FAILED, RunState.CANCELLED}) <= (kind is not None), told
        assert (state.state is RunState.CANCELLED) <= (kind is CauseKind.CANCELLED), told
        # another attempt follows where somebody asked for it, and no role failed by itself on good hardware
        if state.state is RunState.REQUEUED:
            assert moves or "leave" in way, told
            assert "blame" in way or kind not in {CauseKind.EXIT, CauseKind.CANCELLED}, told
        assert again <= (state.state is RunState.FAILED and retries and not state.saving), told
        # followers see an end where no attempt follows at once, and only there
        assert (board.shown[-1] in LAST) == (not again), told
        with pytest.raises(AssertionError, match="cannot go from"):
            state.running() if state.state is RunState.STARTING else state.stop(None)
    assert all(ended.values()), ended


def test_a_second_signal_skips_the_save() -> None:
    state = AttemptState(_Board())  # type: ignore[arg-type]
    assert state.cancel(killed_within_s=None)
    assert not state.hurry.is_set()
    assert not state.cancel(killed_within_s=None)
    assert state.hurry.is_set()
    state.stop(cause(CauseKind.EXIT))
    assert not state.conclude(cause(CauseKind.EXIT), retries=lambda _: True), "nobody in a hurry waits for another"


def test_time_runs_from_the_warning_and_not_after_a_person_cancelled() -> None:
    now = [100.0]
    state = AttemptState(_Board(), clock=lambda: now[0])  # type: ignore[arg-type]
    assert state.left_s is None
    assert state.warn(60.0)
    now[0] = 130.0
    assert (state.left_s, state.warn(60.0)) == (30.0, False), "the first warning counts"
    state.cancel(killed_within_s=30.0)
    now[0] = 200.0
    assert state.left_s == 0.0
    state.cancelled(cause(CauseKind.CANCELLED), by_person=True)
    assert (state.left_s, state.asked_by_slurm) == (None, False)
