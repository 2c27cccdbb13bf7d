"""Watching jobs while Slurm comes and goes: what is known, how old it is, and what stands in the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmUnavailableError
from hpcrl.slurm.records import Job
from hpcrl.slurm.states import JobState

_REQUEUED_ENDS = frozenset({JobState.NODE_FAIL, JobState.PREEMPTED, JobState.BOOT_FAIL})
"""Ends after which Slurm may start the job again by itself: such an end holds only as long as Slurm reports it."""


class JobView(msgspec.Struct, frozen=True):
    """Known state of a job.

    Attributes
    ----------
    state:
        Present state; UNKNOWN where Slurm did not answer the last time, or did not know the job.
    last:
        Last known job; None where it was never known.
    age_s:
        Age of ``last`` in seconds.
    warning:
        Reason why ``state`` is unknown; empty where it is known.
    answered:
        Slurm answered the last time; where ``state`` is unknown nevertheless, it does not know the job.
    """

    state: JobState
    last: Job | None
    age_s: float
    warning: str
    answered: bool = True


class JobWatcher:
    """Polls many jobs by one query per interval, and never treats a missing answer as an end.

    Parameters
    ----------
    interval_s:
        Minimum seconds between the end of a query, answered or not, and the next one of any caller, which bounds the
        load on the controller.
    waiting_interval_s:
        The same while all of these jobs wait in the queue, where fewer queries suffice.
    """

    def __init__(
        self,
        client: SlurmClient,
        *,
        interval_s: float = 10.0,
        waiting_interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._interval_s = interval_s
        self._waiting_interval_s = interval_s if waiting_interval_s is None else waiting_interval_s
        self._clock = clock
        self._asked_at: float | None = None
        self._asked: frozenset[int] = frozenset()
        self._known: dict[int, tuple[Job, float]] = {}
        self._answered_at: float | None = None
        self._away = ""

    def poll(self, job_ids: Iterable[int], *, expected: Mapping[int, int] | None = None) -> dict[int, JobView]:
        """Return a view of each job; ask Slurm where the last answer is older than the interval, or a job is new."""
        wanted = frozenset(job_ids)
        since_s = None if self._asked_at is None else self._clock() - self._asked_at
        if since_s is None or since_s >= self._pause_s(wanted) or not wanted <= self._asked:
            self._ask(wanted, expected or {})
        now = self._clock()
        return {job_id: self._view(job_id, now) for job_id in sorted(wanted)}

    def ask_soon(self) -> None:
        """Let the next `poll` ask Slurm, because a job was just changed."""
        self._asked_at = None

    def _pause_s(self, wanted: frozenset[int]) -> float:
        last = [self._known[job_id][0].state for job_id in wanted if job_id in self._known]
        open_ends = [state for state in last if not state.ended or state in _REQUEUED_ENDS]
        waits = bool(open_ends) and all(state.waiting for state in open_ends)
        return self._waiting_interval_s if waits else self._interval_s

    def _ask(self, wanted: frozenset[int], expected: Mapping[int, int]) -> None:
        self._asked = wanted
        try:
            jobs = self._client.jobs(wanted, expected=expected)
        except SlurmUnavailableError as error:
            self._away = str(error).partition("\n")[0]  # without the hint
            return
        finally:
            # measured after the query, which may take as long as its timeout
            self._asked_at = now = self._clock()
        self._away, self._answered_at = "", now
        self._known |= {job_id: (job, now) for job_id, job in jobs.items()}

    def _view(self, job_id: int, now: float) -> JobView:
        last, known_at = self._known.get(job_id, (None, now))
        if last is not None and last.state.ended and last.state not in _REQUEUED_ENDS:
            return JobView(last.state, last, now - known_at, "")  # a reported end stays valid
        if self._away:
            silent = "yet" if self._answered_at is None else f"for {now - self._answered_at:.0f} s"
            return JobView(
                JobState.UNKNOWN, last, now - known_at, f"Slurm has not answered {silent}: {self._away}", False
            )
        if last is None or known_at != self._answered_at:
            return JobView(JobState.UNKNOWN, last, now - known_at, f"Slurm does not know job {job_id}")
        warning = "" if last.state is not JobState.UNKNOWN else "Slurm did not say the state of every component"
        return JobView(last.state, last, now - known_at, warning)
