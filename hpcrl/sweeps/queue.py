"""Queue of a sweep: which members are started now, and the start of each exactly once.

A member is started by the one way of all runs (`hpcrl.submit`). What was started is read from the members' own records
each time, so that a queue that was killed continues where it was: a start whose record was lost with its process is
found by its processes, or by its job (`hpcrl.submit.jobs.find_unrecorded`).

On Slurm all members are submitted at once. With ``max_running`` of K they form K chains: each job depends on the end of
the one before it in its chain (``afterany``), so that Slurm itself keeps the limit. Job arrays would need one script
and one shape for all, and heterogeneous jobs cannot be arrays. Elsewhere the queue is a process that waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.runs.contents import RunContents
from hpcrl.runs.record import RunRecord, user_name
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.claim import claimed
from hpcrl.submit.jobs import find_unrecorded
from hpcrl.submit.resume import resume as resume_run
from hpcrl.submit.submission import submit_attempt
from hpcrl.sweeps.member_views import MemberView, view_members
from hpcrl.sweeps.predecessors import jobs_to_wait_for
from hpcrl.sweeps.sweep_files import QueueState, SweepDir

_log = logging.getLogger(__name__)
_RETRY_S = 30.0
"""Time in seconds after which a member that could not be started is tried again."""
_MAX_TRIES = 5
"""Maximum number of starts that fail for another reason than the filesystem."""


class SweepQueue:
    """Starts the members of a sweep, as far as there is room.

    Parameters
    ----------
    sweep:
        A sweep that was made.
    """

    def __init__(self, sweep: SweepDir) -> None:
        self._sweep = sweep
        self._record = sweep.read()
        self._tries: dict[int, int] = {}
        self._retry_at_s: dict[int, float] = {}
        self._has_looked = False
        self.problems: dict[int, str] = {}
        self.waits_for = ""

    def advance(self) -> bool:
        """Start what may be started now; return whether members are left that this queue has to start later.

        A member that cannot be started is noted in `problems` and tried again later; the others are started.
        """
        if self._sweep.cancelled_by:
            return False
        targets = self._sweep.stored_queue().targets
        before = [RunDir(Path(path)) for path in self._record.after]
        jobs, self.waits_for = jobs_to_wait_for(before, by_slurm=self._record.executor == "slurm")
        views = view_members(self._sweep, self._record)
        if not self._has_looked:
            if not self._notice_starts(views):
                return True
            views, self._has_looked = view_members(self._sweep, self._record), True
        due = [
            view for view in views if view.is_due(targets.get(view.member.number, 1)) and not self._is_given_up(view)
        ]
        unread = self._unread(views)
        if self.waits_for or not due:
            return bool(due) or unread
        by_slurm = self._record.executor == "slurm"
        chains = _Chains(self._record.max_running if by_slurm else None, views, jobs)
        running = sum(view.alive or view.unreadable for view in views)
        started = 0
        # a member that is refused again and again comes behind those that were not tried
        for view in sorted(due, key=lambda each: self._retry_at_s.get(each.member.number, 0.0)):
            if self._retry_at_s.get(view.member.number, 0.0) > time.time() or self._sweep.cancelled_by:
                continue
            if not by_slurm and running + started >= (self._record.max_running or len(views)):
                break
            if self._start(view, chains):
                started += 1
            elif not by_slurm:
                # it may run all the same, without a record: the next round looks before it starts another one
                break
        return started < len(due) or unread

    def _unread(self, views: Sequence[MemberView]) -> bool:
        """Note members that cannot be read; return whether one of them will be checked again."""
        for view in views:
            number, now = view.member.number, time.time()
            if view.unreadable and self._retry_at_s.get(number, 0.0) <= now:
                self._tries[number], self._retry_at_s[number] = self._tries.get(number, 0) + 1, now + _RETRY_S
                self.problems[number] = f"{view.run.path} cannot be read"
                _log.warning("%s: %s", view.member.name, self.problems[number])
        return any(view.unreadable and not self._is_given_up(view) for view in views)

    def _notice_starts(self, views: Sequence[MemberView]) -> bool:
        """Record starts that a killed queue could not record; return whether that could be done.

        A job is found when its member is started again.
        """
        for view in views:
            if self._record.executor == "local" and view.record is not None and view.record.queued:
                try:
                    find_unrecorded(view.run)
                except (HpcrlError, OSError) as error:
                    _log.warning("%s: %s", view.member.name, error)
                    return False
        return True

    def _is_given_up(self, view: MemberView) -> bool:
        return self._tries.get(view.member.number, 0) >= _MAX_TRIES

    def _start(self, view: MemberView, chains: _Chains) -> bool:
        """Start a member, or note why it could not be started; return whether it was."""
        number, name = view.member.number, view.member.name
        try:
            after = chains.before(number)
            if view.submissions:
                resume_run(view.run, after=after, say=lambda text: _log.info("%s: %s", name, text))
            else:
                start_member(view.run, after)
        except (HpcrlError, OSError) as error:
            if not isinstance(error, OSError):  # a full disk may have room later
                self._tries[number] = self._tries.get(number, 0) + 1
            self._retry_at_s[number] = time.time() + _RETRY_S
            self.problems[number], self._has_looked = str(error), False
            _log.warning("%s could not be started: %s", name, error)
            return False
        chains.append(number, RunRecord.read(view.run))
        self.problems.pop(number, None)
        _log.info("started %s", name)
        return True

    def report(self, state: QueueState) -> None:
        """Write what the queue did, keeping what others asked of it; a full disk is only logged."""
        try:
            targets = self._sweep.stored_queue().targets
            problems = dict(self.problems)
            self._sweep.write_queue(
                msgspec.structs.replace(state, targets=targets, problems=problems, waits_for=self.waits_for)
            )
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._sweep.queue_path, error)


class _Chains:
    """Chains of jobs, of which each waits for the end of the one before it.

    Parameters
    ----------
    count:
        Number of chains; None: no job waits for another member.
    views:
        Members as they are now.
    first:
        Jobs of other runs that the first job of each chain waits for.
    """

    def __init__(self, count: int | None, views: Sequence[MemberView], first: Sequence[int]) -> None:
        self._count, self._first = count, list(first)
        self._last: dict[int, int] = {}
        for view in sorted(views, key=lambda each: each.submitted_at_s):
            if count is not None and view.alive and view.job_id is not None:
                self._last[view.member.number % count] = view.job_id

    def before(self, number: int) -> list[int]:
        """Return the jobs whose end the job of a member waits for."""
        last = None if self._count is None else self._last.get(number % self._count)
        return self._first if last is None else [last]

    def append(self, number: int, record: RunRecord) -> None:
        """Note the job that a member got."""
        if self._count is not None and record.submissions:
            self._last[number % self._count] = int(record.submissions[-1].job_id)


def start_member(run: RunDir, after: Sequence[int] = ()) -> None:
    """Start a member that was never started; do nothing where it was, or was withdrawn, meanwhile.

    Raises
    ------
    RunDirError
        Another process is at it.
    hpcrl.slurm.errors.SlurmError
        Slurm does not answer, or refuses the job. The member stays in the queue.
    OSError
        The filesystem refuses.
    """
    if find_unrecorded(run).submissions:
        return
    with claimed(run, user=user_name()):
        contents = RunContents.read(run)
        if contents.record.queued:
            submit_attempt(contents, after=after)
