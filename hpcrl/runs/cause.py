"""Cause of the end of a run: candidates, and which of them was first."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from hpcrl.errors import (
    ConfigError,
    EnvironmentFailedError,
    ExitCode,
    NothingToRestoreError,
    RolloutsFailedError,
    RunFailedError,
)
from hpcrl.runs.clocks import Clocks
from hpcrl.runs.role import FailureRecord


class CauseKind(StrEnum):
    """Kind of the end of a run; part of the JSON of ``status`` and ``why``."""

    ERROR = "error"
    """A role recorded why it failed (`hpcrl.runs.role.FailureRecord`)."""
    EXIT = "exit"
    """A role ended with an exit code or by a signal, without a failure record."""
    EARLY_EXIT = "early_exit"
    """A role ended cleanly that should have continued."""
    SPAWN = "spawn"
    """The command of a role could not be started."""
    NO_STEP = "no_step"
    """Slurm refused a role its step, or the step ended before a process of hpcrl ran in it."""
    START_TIMEOUT = "start_timeout"
    """A role was not ready by its deadline."""
    HUNG = "hung"
    """A role's process ran and made no progress."""
    STALE = "stale"
    """An engine did not accept a policy version."""
    WRONG_WEIGHTS = "wrong_weights"
    """An engine computed with other weights than those of the version that it reported."""
    GUARD_LOST = "guard_lost"
    """The guard process of a role was lost, and the role with it."""
    SUPERVISOR_LOST = "supervisor_lost"
    """The supervisor was lost without recording an end."""
    SUPERVISOR_ERROR = "supervisor_error"
    """The supervisor itself failed."""
    LAUNCHER_LOST = "launcher_lost"
    """The process that started the supervisor was lost."""
    TIME_LIMIT = "time_limit"
    """The run took longer than the plan allows."""
    NODE_FAIL = "node_fail"
    """A node went down."""
    PREEMPTED = "preempted"
    """Slurm gave the nodes to another job."""
    NO_PROGRESS = "no_progress"
    """Consecutive attempts ended without a new joint checkpoint, or there were too many attempts."""
    DISK_FULL = "disk_full"
    """The filesystem of the run, or its quota, was full."""
    NOTHING_TO_RESTORE = "nothing_to_restore"
    """The run has saved checkpoints, none can be restored, and it does not start from the beginning by itself."""
    ROLLOUTS_FAILED = "rollouts_failed"
    """Too large a share of the rollouts of an environment failed (``rollouts.failures``)."""
    CHANGED = "changed"
    """The software differs from that of the submit, and ``job.on_change`` is ``stop``."""
    CANCELLED = "cancelled"
    """The run was cancelled on request."""

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of the job, and of a command that follows the run."""
        return _EXIT_CODES.get(self, ExitCode.FAILED)


_EXIT_CODES = {
    CauseKind.NO_PROGRESS: ExitCode.NO_PROGRESS,
    CauseKind.NOTHING_TO_RESTORE: ExitCode.NOTHING_TO_RESTORE,
}


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Cause of the end of a run, or a candidate for it.

    Attributes
    ----------
    kind:
        Kind of the end.
    time_s:
        Time of the end, in seconds since the epoch.
    message:
        One sentence for a person.
    role, replica, rank:
        The role that ended, if it was one.
    exit_code, signal:
        End of the process, where known; one of the two.
    error, traceback:
        Type of the exception and its traceback, where the role recorded them.
    secondary:
        True where it followed from the end of another role.
    dump, frames:
        Stacks of a role that hung: the file, relative to the run directory, and the top frames.
    details:
        Further details in lines, hints included.
    node:
        Slurm's name of the node whose clock timed the end; empty for the supervisor's own node. ``time_s`` is by the
        supervisor's clock in either case.
    doubt:
        Why another failure may have been earlier, within the precision of the clocks; empty where it was not.
    """

    kind: CauseKind
    time_s: float
    message: str
    role: str | None = None
    replica: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""
    traceback: str = ""
    secondary: bool = False
    dump: str = ""
    frames: list[str] = []
    details: list[str] = []
    node: str = ""
    doubt: str = ""

    @property
    def where(self) -> str:
        """Return ``<role> <replica>`` (and the rank above 0), or ``run``."""
        if self.role is None:
            return "run"
        return f"{self.role} {self.replica}" + (f" rank {self.rank}" if self.rank else "")


_SIGNALLED = 128
"""Offset of the exit code with which shells and launchers report the signal that killed their process."""
_SHELL_CODES = {126: "its command is not executable", 127: "its command was not found"}


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; ``signal 77`` for a number without a name."""
    return _name_of_signal(number) or f"signal {number}"


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def describe_end(exit_code: int | None, signum: int | None) -> str:
    """Return how a process ended, as the end of a sentence: ``was killed by SIGKILL``, ``exited with code 1``."""
    if signum is not None:
        return f"was killed by {signal_name(signum)}"
    if not exit_code:
        return "exited with code 0"
    meaning = _SHELL_CODES.get(exit_code, "")
    if exit_code > _SIGNALLED and (name := _name_of_signal(exit_code - _SIGNALLED)):
        meaning = f"a process that it waited for was killed by {name}"
    return f"exited with code {exit_code}" + (f": {meaning}" if meaning else "")


def from_record(record: FailureRecord) -> Cause:
    """Return a role's own failure record as a candidate."""
    rank = f" rank {record.rank}" if record.rank else ""
    first_line, *more = record.message.strip().split("\n")
    environment = EnvironmentFailedError.__name__
    told = {
        NothingToRestoreError.__name__: CauseKind.NOTHING_TO_RESTORE,
        RolloutsFailedError.__name__: CauseKind.ROLLOUTS_FAILED,
        environment: CauseKind.ERROR,
    }
    where = f"{record.role} {record.replica}{rank}"
    if record.error in told:
        # not a failure of that role, or one of the user's code, which hpcrl's traceback does not explain
        return Cause(
            kind=told[record.error],
            time_s=record.time_s,
            message=first_line,
            role=record.role,
            replica=record.replica,
            error=record.error,
            details=more,
            node=record.node if record.error == environment else "",
        )
    if record.error == RunFailedError.__name__:  # its lines are complete, and the place in hpcrl's code is irrelevant
        return Cause(
            kind=CauseKind.ERROR,
            time_s=record.time_s,
            message=f"{where} failed: {first_line}",
            role=record.role,
            replica=record.replica,
            rank=record.rank,
            error=record.error,
            secondary=record.secondary,
            details=more,
            node=record.node,
        )
    if record.error == ConfigError.__name__ and more:  # it begins with how many problems there are
        first_line = more[0].strip()
    return Cause(
        kind=CauseKind.ERROR,
        time_s=record.time_s,
        message=f"{where} failed: {record.error}: {first_line}".rstrip(": "),
        role=record.role,
        replica=record.replica,
        rank=record.rank,
        error=record.error,
        traceback=record.traceback,
        secondary=record.secondary,
        node=record.node,
    )


def choose_cause(ends: Iterable[Cause], records: Sequence[FailureRecord], clocks: Clocks | None = None) -> Cause | None:
    """Return the first primary candidate by time, else the first secondary one; None without candidates.

    Parameters
    ----------
    ends:
        Observations of the supervisor: unrequested ends of roles, missed deadlines, its own errors.
    records:
        Failure records that roles wrote before they were asked to stop.
    clocks:
        Clocks of the attempt's nodes, by which times were corrected. Where they are too imprecise to order two
        failures, the cause says so (`Cause.doubt`).

    Notes
    -----
    The exit of a role that reports a lost peer is a consequence, as its record is. Where one worker of a replica was
    killed by a signal, the records of its sister ranks are consequences, although they are written earlier than the
    launcher of the ranks reports the death.
    """
    ends = list(ends)
    killed = {(end.role, end.replica) for end in ends if end.rank is not None and end.signal is not None}
    candidates = []
    for record in records:
        cause = from_record(record)
        if (record.role, record.replica) in killed:
            cause = msgspec.structs.replace(cause, secondary=True)
        candidates.append(cause)
    for end in ends:
        said = [record for record in records if (record.role, record.replica) == (end.role, end.replica)]
        follows = bool(said) and all(record.secondary for record in said) and end.signal is None
        first_word = min((record.time_s for record in said), default=end.time_s)
        # a worker died before its sister ranks failed; the launcher of the ranks reported it later
        time_s = min(end.time_s, first_word) if end.rank is not None and end.signal is not None else end.time_s
        candidates.append(msgspec.structs.replace(end, time_s=time_s, secondary=end.secondary or follows))
    first = min(candidates, key=lambda cause: (cause.secondary, cause.time_s), default=None)
    if first is None or clocks is None:
        return first
    return msgspec.structs.replace(first, doubt=_doubt(first, candidates, clocks))


def _doubt(first: Cause, candidates: Sequence[Cause], clocks: Clocks) -> str:
    """Return which other failure may have been earlier than the first; empty where the clocks are precise enough."""
    for other in sorted(candidates, key=lambda cause: cause.time_s):
        if other.secondary != first.secondary or other.node == first.node:
            continue  # one of the two is a consequence, or both times are of the same clock
        clock = clocks.compared(first.node, other.node)
        if other.time_s - first.time_s < clock.uncertain_s:
            nodes = " and ".join(node or "the supervisor's node" for node in (first.node, other.node))
            who = f"{first.where} or {other.where}"
            return f"the clocks of {nodes} differ by {clock}: whether {who} failed first is unknown"
    return ""


#: message of `hpcrl.trainer.launcher` about a killed rank
_KILLED_RANK = re.compile(
    rb" launcher hpcrl\.trainer\.launcher: rank (\d+) \(pid \d+\) was killed by (SIG\w+|signal \d+)"
)
#: message of torchrun, which older runs used, about the first dead worker, for example
#: ``failed (exitcode: -9) local_rank: 1 (pid: 4242) of binary``
_DEAD_WORKER = re.compile(rb"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
#: and the same in its summary, where it also knows the rank among all nodes
_ROOT_CAUSE = re.compile(rb"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+) ")


def find_dead_worker(log: bytes) -> tuple[int, int] | None:
    """Rank and signal of the rank that its launcher names as killed in its log; None where it names none.

    In a log of torchrun's the rank is the one on its node where the log ends before the summary.
    """
    if match := _KILLED_RANK.search(log):
        name = match[2].decode()
        return int(match[1]), signal.Signals[name] if name.startswith("SIG") else int(name.split()[1])
    if match := _ROOT_CAUSE.search(log, log.rfind(b"Root Cause")) if b"Root Cause" in log else None:
        rank, code = int(match[1]), int(match[2])
    elif match := _DEAD_WORKER.search(log):
        rank, code = int(match[2]), int(match[1])
    else:
        return None
    return (rank, -code) if code < 0 else None
