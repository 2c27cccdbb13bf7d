"""Process of a queue that waits: ``python -m hpcrl.sweeps.queue_process DIRECTORY [--work]``.

It outlives the terminal. Without ``--work`` it starts itself again with it, and once more whenever that process is
killed, so that a sweep needs no person at night. It ends with the start of the last member: members have supervisors of
their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from hpcrl.errors import ExitCode, RunDirError
from hpcrl.processes import procfs
from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.reporting.log_format import start_logging
from hpcrl.runs.job_facts import set_job_query
from hpcrl.runs.record import user_name
from hpcrl.runs.start.claim import claimed_directory
from hpcrl.runs.status import ProcessId
from hpcrl.slurm.lookup import look_up
from hpcrl.sweeps.queue import SweepQueue
from hpcrl.sweeps.sweep_files import QueueState, SweepDir

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_POLL_OF_MEMBER_S = 0.02
"""Further seconds between two rounds, of each member: looking at many takes longer."""
_MAX_RESTARTS = 20
_RESTART_S, _MAX_RESTART_S = 1.0, 60.0
_SILENT_S = 120.0
"""Time in seconds after which a queue on another machine counts as dead."""
_BEGIN_S = 20.0
"""Maximum time in seconds until a queue that was just started reports."""


#: keeps processes that we started from being collected while they run
_started: list[subprocess.Popen[bytes]] = []


def queue_process(sweep: SweepDir) -> ProcessId | None:
    """Return the process of the queue of a sweep where it is alive, as far as can be seen; else None."""
    state = sweep.queue()
    if state.process is None:
        return None
    alive = state.process.alive()
    if alive is None:
        alive = time.time() - state.heartbeat_s < _SILENT_S
    return state.process if alive else None


def start_queue(sweep: SweepDir) -> None:
    """Start the queue of a sweep in a session of its own, unless one is alive.

    Raises
    ------
    RunDirError
        It does not begin; the message names its log.
    """
    if queue_process(sweep) is not None:
        return
    directory = Path(sweep.read().cwd)
    with sweep.log_path.open("ab") as log:
        process = subprocess.Popen(
            module_command(sys.executable, "hpcrl.sweeps.queue_process", str(sweep.path)),
            cwd=directory if directory.is_dir() else None,
            env=with_safe_path(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started[:] = [process, *(other for other in _started if other.poll() is None)]
    deadline = time.monotonic() + _BEGIN_S
    while queue_process(sweep) is None and process.poll() is None:
        if time.monotonic() > deadline:
            return  # a busy machine: it reports later
        time.sleep(0.1)
    if process.poll() not in (None, 0):
        raise RunDirError(
            f"the queue of {sweep.name} has ended at once; its log is {sweep.log_path}\n"
            f"    hint: start it again: hpcrl sweep resume {sweep.name}"
        )


def work(sweep: SweepDir) -> int:
    """Start members until none is left to start; returns an exit code."""

    def busy(who: str) -> str:
        return f"the sweep {sweep.name} has a queue already ({who})"

    mine = ProcessId.of(os.getpid())
    try:
        with claimed_directory(sweep.path, user=user_name(), busy=busy):
            queue = SweepQueue(sweep)
            pause_s = _POLL_S + _POLL_OF_MEMBER_S * len(sweep.read().members)
            left = True
            while left:
                queue.report(QueueState(process=mine, heartbeat_s=time.time()))
                left = queue.advance()
                if left:
                    time.sleep(pause_s)
            queue.report(QueueState(process=None, heartbeat_s=time.time()))
    except RunDirError as error:
        _log.error("%s", error)
        return ExitCode.USAGE
    _log.info("no member is left to start")
    return ExitCode.OK


def keep(sweep: SweepDir) -> int:
    """Run the queue in a process of its own, and start it again where it is killed; returns an exit code."""
    children: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    for restart in range(_MAX_RESTARTS + 1):
        command = module_command(sys.executable, "hpcrl.sweeps.queue_process", str(sweep.path), "--work")
        children[:] = [subprocess.Popen(command)]
        code = children[0].wait()
        if code in (ExitCode.OK, ExitCode.USAGE) or sweep.cancelled_by:
            return code
        pause_s = min(_MAX_RESTART_S, _RESTART_S * 2**restart)
        _log.warning("the queue was ended (%d); it is started again in %g s", code, pause_s)
        time.sleep(pause_s)
    _log.error("the queue was ended %d times: given up", _MAX_RESTARTS)
    return ExitCode.FAILED


def stop_queue(sweep: SweepDir, *, timeout_s: float) -> None:
    """Wait until the queue of a cancelled sweep has ended, and kill it where that takes longer than ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (process := queue_process(sweep)) is not None:
        if time.monotonic() > deadline:
            found = procfs.read_process(process.pid)
            if process.alive() and found is not None:
                procfs.send_signal([found], signal.SIGKILL)
            return
        time.sleep(0.1)


def main() -> int:
    """Run a queue."""
    start_logging("%(message)s")
    set_job_query(look_up)
    sweep = SweepDir(Path(sys.argv[1]))
    with contextlib.suppress(KeyboardInterrupt):
        return work(sweep) if "--work" in sys.argv[2:] else keep(sweep)
    return ExitCode.CANCELLED


if __name__ == "__main__":
    sys.exit(main())
