"""Watching jobs: how often Slurm is asked, and what is known while it is silent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import pytest
from fake_slurm import FakeSlurm, job

from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import (
    SlurmUnavailableError,
)
from hpcrl.slurm.records import HetComponent, Job
from hpcrl.slurm.states import JobState
from hpcrl.slurm.watch import JobWatcher


def watcher(slurm: FakeSlurm) -> JobWatcher:
    return JobWatcher(slurm.client(), interval_s=10.0, clock=slurm.clock)


def test_watcher_bounds_the_load(slurm: FakeSlurm) -> None:
    slurm.queue = {1: job(1, "RUNNING"), 2: job(2, "RUNNING")}
    watch = watcher(slurm)
    for _ in range(5):
        watch.poll([1, 2])
    assert len(slurm.calls) == 1
    slurm.now = 10.0
    watch.poll([1, 2])
    assert len(slurm.calls) == 2
    slurm.now = 14.0
    assert {view.age_s for view in watch.poll([1, 2]).values()} == {4.0}
    assert len(slurm.calls) == 2


def test_silence_is_a_warning(slurm: FakeSlurm) -> None:
    slurm.queue = {1: job(1, "RUNNING")}
    watch = watcher(slurm)
    assert watch.poll([1])[1].state is JobState.RUNNING
    slurm.away, slurm.now = True, 600.0
    view = watch.poll([1])[1]
    assert view.state is JobState.UNKNOWN
    assert view.last is not None
    assert view.last.state is JobState.RUNNING
    assert view.age_s == 600.0
    assert "has not answered for 600 s" in view.warning
    slurm.away, slurm.now = False, 620.0
    assert watch.poll([1])[1].warning == ""


def test_never_answered(slurm: FakeSlurm) -> None:
    slurm.away = True
    view = watcher(slurm).poll([1])[1]
    assert (view.state, view.last) == (JobState.UNKNOWN, None)
    assert "has not answered yet" in view.warning


def test_vanished_job_is_unknown_not_completed(slurm: FakeSlurm) -> None:
    slurm.queue, slurm.accounting = {1: job(1, "RUNNING")}, False
    watch = watcher(slurm)
    watch.poll([1])
    slurm.queue, slurm.now = {}, 20.0
    view = watch.poll([1])[1]
    assert view.state is JobState.UNKNOWN
    assert "does not know job 1" in view.warning


@pytest.mark.parametrize(
    ("end", "later"), [("COMPLETED", "COMPLETED"), ("CANCELLED", "CANCELLED"), ("NODE_FAIL", "UNKNOWN")]
)
def test_ends_are_remembered_unless_slurm_may_requeue(slurm: FakeSlurm, end: str, later: str) -> None:
    slurm.queue, slurm.accounting = {1: job(1, end)}, False
    watch = watcher(slurm)
    assert watch.poll([1])[1].state == end
    slurm.queue, slurm.now = {}, 20.0
    assert watch.poll([1])[1].state == later


class SlowSlurm:
    """A controller whose every question takes a while; answers are given, or None for silence."""

    def __init__(self, takes_s: float, state: JobState | None) -> None:
        self.now, self.asked, self._takes_s, self._state = 0.0, 0, takes_s, state

    def clock(self) -> float:
        return self.now

    def jobs(self, ids: Iterable[int], expected: Mapping[int, int] | None = None) -> dict[int, Job]:
        self.asked += 1
        self.now += self._takes_s
        if self._state is None:
            raise SlurmUnavailableError("no answer")
        return {
            each: Job.of([HetComponent(job_id=each, leader_id=each, offset=0, state=self._state, source="squeue")])
            for each in ids
        }


@pytest.mark.parametrize(
    ("takes_s", "state", "in_a_minute"),
    [(10.0, None, 5), (3.0, JobState.RUNNING, 12), (0.0, JobState.RUNNING, 30), (0.0, JobState.PENDING, 6)],
)
def test_the_pause_between_questions_begins_when_one_has_ended(
    takes_s: float, state: JobState | None, in_a_minute: int
) -> None:
    slurm = SlowSlurm(takes_s, state)
    watcher = JobWatcher(cast("SlurmClient", slurm), interval_s=2.0, waiting_interval_s=10.0, clock=slurm.clock)
    while slurm.now < 60.0:
        for _ in range(6):
            watcher.poll([1, 2, 3])
        slurm.now += 0.5
    assert slurm.asked <= in_a_minute + 1
    asked = slurm.asked
    watcher.poll([1, 2, 3])
    watcher.ask_soon()
    watcher.poll([1, 2, 3])
    assert slurm.asked - asked in (1, 2)


def test_every_view_says_how_old_what_it_knows_is(slurm: FakeSlurm) -> None:
    """By a clock that does not begin at zero."""
    slurm.now = 1000.0
    slurm.queue, slurm.accounting = {1: job(1, "RUNNING"), 2: job(2, "COMPLETED"), 3: job(3, "RUNNING")}, False
    watch = watcher(slurm)
    assert [view.age_s for view in watch.poll([1, 2, 3]).values()] == [0.0, 0.0, 0.0]
    slurm.now = 1004.0
    assert [view.age_s for view in watch.poll([1, 2, 3]).values()] == [4.0, 4.0, 4.0]
    # Slurm has forgotten the first two, and of these only an end is still true
    del slurm.queue[1], slurm.queue[2]
    slurm.now = 1030.0
    views = watch.poll([1, 2, 3])
    assert [view.age_s for view in views.values()] == [30.0, 30.0, 0.0]
    assert [view.state for view in views.values()] == [JobState.UNKNOWN, JobState.COMPLETED, JobState.RUNNING]
    slurm.away, slurm.now = True, 1100.0
    views = watch.poll([1, 2, 3])
    assert [view.age_s for view in views.values()] == [100.0, 100.0, 70.0]
    assert [view.state for view in views.values()] == [JobState.UNKNOWN, JobState.COMPLETED, JobState.UNKNOWN]
