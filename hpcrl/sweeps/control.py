"""Starting, resuming and cancelling a whole sweep."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

import msgspec

from hpcrl.errors import HpcrlError, RunDirError
from hpcrl.runs.record import RunRecord, user_name
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.claim import claimed
from hpcrl.runs.status import RunState
from hpcrl.slurm.reach import reachable_slurm
from hpcrl.submit.submission import cancel as cancel_run
from hpcrl.sweeps.member_views import MemberView, view_members
from hpcrl.sweeps.queue import SweepQueue
from hpcrl.sweeps.queue_process import queue_process, start_queue, stop_queue
from hpcrl.sweeps.sweep_files import QueueState, SweepDir

_STOP_S = 60.0
"""Time in seconds in which a queue notices that its sweep is cancelled."""
Say = Callable[[str], None]


def start_sweep(sweep: SweepDir, say: Say) -> None:
    """Start the members of a sweep: hand all of them to Slurm, or start the process that queues them.

    Raises
    ------
    RunDirError
        Members could not be handed to Slurm; the message says which, and why. Those stay in the queue.
    """
    record = sweep.read()
    if record.executor == "slurm":
        queue = SweepQueue(sweep)
        left = queue.advance()
        queue.report(QueueState(heartbeat_s=time.time()))
        if not queue.waits_for:
            _refuse_left(sweep, queue, left)
            return
        say(f"waiting for {queue.waits_for}")
    start_queue(sweep)


def _refuse_left(sweep: SweepDir, queue: SweepQueue, left: bool) -> None:
    if not left:
        return
    reasons = [*dict.fromkeys(queue.problems.values())]
    raise RunDirError(
        f"{len(queue.problems)} members of {sweep.name} were not handed over:\n"
        + "\n".join(f"  {reason}" for reason in reasons[:3])
        + f"\n    hint: they stay in the queue; when that is solved: hpcrl sweep resume {sweep.name}"
    )


def resume_sweep(sweep: SweepDir, say: Say, *, failed: bool = False) -> None:
    """Start what is left of a sweep: members that were not started, were lost, or were cancelled with it.

    Parameters
    ----------
    failed:
        Also members that failed.

    Raises
    ------
    RunDirError
        It was never made whole; or members cannot be handed to Slurm.
    """
    record = sweep.read()
    if not record.made:
        if record.maker is not None and record.maker.alive() is not False:
            raise RunDirError(f"the sweep {sweep.name} is being made by pid {record.maker.pid} on {record.maker.host}")
        raise RunDirError(
            f"the submit of {sweep.name} was killed before all members were made; nothing was started\n"
            f"    hint: submit it again, which removes what is left: {shlex.join(record.argv)}"
        )
    if record.executor == "slurm":
        reachable_slurm()
    cancelled_at_s = None if (cancelled := sweep.cancelled) is None else cancelled.time_s
    targets = dict(sweep.stored_queue().targets)
    for view in view_members(sweep, record):
        if view.record is None or view.view is None:
            why = "cannot be read" if view.unreadable else "was removed"
            say(f"{view.member.name} {why}, and is left out")
        elif view.record.withdrawn is not None:
            # one that was cancelled by itself stays so
            if cancelled_at_s is not None and view.record.withdrawn.time_s >= cancelled_at_s:
                _let_queue(view.run)
        elif _is_resumed(view, cancelled_at_s, failed=failed):
            targets[view.member.number] = view.submissions + 1
            say(f"{view.member.name} ({view.view.state}) gets another attempt")
    if queue_process(sweep) is None:
        sweep.write_queue(msgspec.structs.replace(sweep.stored_queue(), targets=targets, problems={}, process=None))
    elif targets != sweep.stored_queue().targets:
        raise RunDirError(
            f"the queue of {sweep.name} is at work; it starts what was not started yet\n"
            "    hint: resume members that have ended by their names: hpcrl resume RUN"
        )
    sweep.cancelled_path.unlink(missing_ok=True)
    start_sweep(sweep, say)


def _is_resumed(view: MemberView, cancelled_at_s: float | None, *, failed: bool) -> bool:
    assert view.view is not None
    assert view.record is not None
    if view.view.state is RunState.CANCELLED:
        # of members that were cancelled by themselves, another attempt would not be wanted
        asked_s = view.record.submissions[-1].cancel_requested_at_s if view.record.submissions else None
        return cancelled_at_s is not None and (asked_s or 0.0) >= cancelled_at_s
    return view.view.state is RunState.LOST or (failed and view.view.state is RunState.FAILED)


def cancel_sweep(sweep: SweepDir, say: Say) -> None:
    """End a sweep: no member is started from now on, and those that live are cancelled, the last one first.

    Raises
    ------
    RunDirError
        Members could not be cancelled; all others were.
    """
    record, user = sweep.read(), user_name()
    sweep.cancel(user)
    stop_queue(sweep, timeout_s=_STOP_S)
    failures = []
    # of a chain of jobs each starts when the one before it ends
    for view in reversed(view_members(sweep, record)):
        try:
            if view.alive or (view.record is not None and view.record.queued):
                say(f"{view.member.name}: {cancel_run(view.run, user=user).state}")
        except HpcrlError as error:
            failures.append(f"  {view.member.name}: {error}")
        if view.unreadable:
            failures.append(f"  {view.member.name}: {view.run.path} cannot be read, and it may run")
    if failures:
        raise RunDirError(f"{len(failures)} members of {sweep.name} were not cancelled:\n" + "\n".join(failures))


def _let_queue(run: RunDir) -> None:
    with claimed(run, user=user_name()):
        msgspec.structs.replace(RunRecord.read(run), withdrawn=None).write(run)
