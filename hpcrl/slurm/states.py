"""States of Slurm jobs, and one state for a heterogeneous job from all of its components."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum


class JobState(StrEnum):
    """State of a job, by Slurm's names; `UNKNOWN` where Slurm did not say. Missing never means completed."""

    UNKNOWN = "UNKNOWN"
    # waits
    PENDING = "PENDING"
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    # holds nodes
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    COMPLETING = "COMPLETING"
    # has ended
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    REVOKED = "REVOKED"
    FAILED = "FAILED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"

    @property
    def waiting(self) -> bool:
        """Return whether a job is in the queue without nodes."""
        return self in _WAITING

    @property
    def holding(self) -> bool:
        """Return whether a job has nodes."""
        return self in _HOLDING

    @property
    def ended(self) -> bool:
        """Return whether Slurm reported that it is over. An unknown job is neither over nor alive."""
        return self in _ENDED


_WAITING = frozenset({JobState.PENDING, JobState.REQUEUED, JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT})
_HOLDING = frozenset(
    {JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED, JobState.COMPLETING}
)
_ENDED = frozenset(JobState) - _WAITING - _HOLDING - {JobState.UNKNOWN}

_OTHER_NAMES = {
    # passing states of a job that holds nodes
    "SIGNALING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "POWER_UP_NODE": JobState.CONFIGURING,
    "STAGE_OUT": JobState.COMPLETING,
    # names of a waiting job
    "RESV_DEL_HOLD": JobState.PENDING,
    "REQUEUE_FED": JobState.REQUEUED,
    "EXPEDITING": JobState.REQUEUED,
    # ends
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
}

_FLAGS = (
    JobState.REQUEUE_HOLD,
    JobState.SPECIAL_EXIT,
    JobState.REQUEUED,
    JobState.COMPLETING,
    JobState.CONFIGURING,
    JobState.STOPPED,
)
"""States that take precedence over others given with them: a ``COMPLETED,COMPLETING`` job still holds its nodes."""

_LIVE_ORDER = (
    JobState.RUNNING,
    JobState.COMPLETING,
    JobState.STOPPED,
    JobState.SUSPENDED,
    JobState.CONFIGURING,
    JobState.REQUEUE_HOLD,
    JobState.SPECIAL_EXIT,
    JobState.REQUEUED,
    JobState.PENDING,
)
_CAUSE_ORDER = (
    JobState.NODE_FAIL,
    JobState.OUT_OF_MEMORY,
    JobState.PREEMPTED,
    JobState.BOOT_FAIL,
    JobState.TIMEOUT,
    JobState.DEADLINE,
    JobState.FAILED,
    JobState.REVOKED,
    JobState.CANCELLED,
    JobState.COMPLETED,
)
"""Ends of components ordered by closeness to the cause: failures of the machine before those of programs."""


def parse_state(words: str | Iterable[object] | None) -> JobState:
    """Return a state from one word, words with ``,`` or ``+`` between them, or a list (JSON since 23.11).

    ``CANCELLED by 1000`` (sacct) is CANCELLED. An unrecognized word is UNKNOWN.
    """
    if words is None:
        return JobState.UNKNOWN
    if isinstance(words, str):
        words = words.replace("+", ",").split(",")
    parts = [str(word).split() for word in words]
    states = [_parse_word(part[0].upper()) for part in parts if part]
    for flag in _FLAGS:
        if flag in states:
            return flag
    known = [state for state in states if state is not JobState.UNKNOWN]
    if alive := [state for state in known if not state.ended]:
        return alive[0]  # COMPLETED,SIGNALING is not over
    # COMPLETED,LAUNCH_FAILED is not a success
    return next((state for state in _CAUSE_ORDER if state in known), JobState.UNKNOWN)


def _parse_word(word: str) -> JobState:
    try:
        return JobState(word)
    except ValueError:
        return _OTHER_NAMES.get(word, JobState.UNKNOWN)


def fold_states(states: Sequence[JobState], *, expected: int | None = None) -> JobState:
    """Return the state of a job from the states of its components.

    A component that is alive makes the job alive. A job has ended only when all components have ended; its state is
    then the one nearest to the cause. Where ``expected`` is given, fewer components than that are not an end either.
    """
    for state in _LIVE_ORDER:
        if state in states:
            return state
    if not states or JobState.UNKNOWN in states or (expected is not None and len(states) < expected):
        return JobState.UNKNOWN
    return next(state for state in _CAUSE_ORDER if state in states)
