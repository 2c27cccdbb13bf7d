"""Watching jobs while Slurm comes and goes: what is known, how old it is, and what stands in the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmUnavailableError
from hpcrl.slurm.records import Job
from hpcrl.slurm.states import JobState

__all__ = ["JobView", "JobWatcher"]


_REQUEUED_ENDS = frozenset({JobState.NODE_FAIL, JobState.PREEMPTED, JobState.BOOT_FAIL})
"""Ends after which Slurm may start the job again by itself: true only as long as it still says so."""


class JobView(msgspec.Struct, frozen=True):
    """A job as far as it is known.

    Attributes
    ----------
    state:
        State now; UNKNOWN where Slurm did not answer the last time, or did not know the job.
    last:
        What was last known; None where nothing ever was.
    age_s:
        Seconds since that was true.
    warning:
        Why ``state`` is unknown; empty where it is known.
    answered:
        Slurm answered the last time; where ``state`` is unknown all the same, it does not know the job.
    """

    state: JobState
    last: Job | None
    age_s: float
    warning: str
    answered: bool = True


class JobWatcher:
    """Polls many jobs by one query an interval, and never takes silence for an end.

    Parameters
    ----------
    interval_s:
        Least time between two queries, whoever asks: load on the controller is bounded.
    """

    def __init__(
        self, client: SlurmClient, *, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._interval_s = interval_s
        self._clock = clock
        self._asked_at: float | None = None
        self._asked: frozenset[int] = frozenset()
        self._known: dict[int, tuple[Job, float]] = {}
        self._answered_at: float | None = None
        self._away = ""

    def poll(self, job_ids: Iterable[int], *, expected: Mapping[int, int] | None = None) -> dict[int, JobView]:
        """A view of each job. Asks Slurm where the last answer is older than the interval, or a job is new."""
        wanted = frozenset(job_ids)
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= self._interval_s or not wanted <= self._asked:
            self._ask(wanted, expected or {}, now)
        return {job_id: self._view(job_id, now) for job_id in sorted(wanted)}

    def _ask(self, wanted: frozenset[int], expected: Mapping[int, int], now: float) -> None:
        self._asked_at, self._asked = now, wanted
        try:
            jobs = self._client.jobs(wanted, expected=expected)
        except SlurmUnavailableError as error:
            self._away = str(error).split("\n", 1)[0]  # without the hint
            return
        self._away, self._answered_at = "", now
        self._known |= {job_id: (job, now) for job_id, job in jobs.items()}

    def _view(self, job_id: int, now: float) -> JobView:
        last, known_at = self._known.get(job_id, (None, now))
        if last is not None and last.state.ended and last.state not in _REQUEUED_ENDS:
            return JobView(last.state, last, now - known_at, "")  # an end that Slurm has said stays true
        if self._away:
            silent = "yet" if self._answered_at is None else f"for {now - self._answered_at:.0f} s"
            return JobView(
                JobState.UNKNOWN, last, now - known_at, f"Slurm has not answered {silent}: {self._away}", False
            )
        if last is None or known_at != self._answered_at:
            return JobView(JobState.UNKNOWN, last, now - known_at, f"Slurm does not know job {job_id}")
        warning = "" if last.state is not JobState.UNKNOWN else "Slurm did not say the state of every component"
        return JobView(last.state, last, now - known_at, warning)
