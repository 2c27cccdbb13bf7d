"""The end of a replica in words: a candidate for the cause of the run's end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.runs.cause import Cause, CauseKind, describe_end, find_dead_worker, signal_name
from hpcrl.supervisor.process.guarded import End
from hpcrl.supervisor.replicas.component import Component

_LOG_TAIL_BYTES = 1 << 18


def explain_end(component: Component, end: End, logs: Sequence[Path]) -> Cause:
    """Return the cause of an unrequested end of a replica.

    Parameters
    ----------
    component, end:
        The component that ended, and its end.
    logs:
        Logs of its tasks; the launcher of ranks writes to the log of its node which rank was killed.
    """
    what, kind = describe_end(end.exit_code, end.signal), CauseKind.EXIT
    rank, signum = None, end.signal
    # from the outside in: an exit code means little if the step, the guard or Slurm ended the role
    if end.no_step:
        what, kind = (
            f"did not begin: {end.spawn_error}; Slurm's message is in the log of the supervisor",
            CauseKind.NO_STEP,
        )
    elif end.spawn_error:
        what, kind = f"could not be started: {end.spawn_error}", CauseKind.SPAWN
    elif end.guard_lost:
        guard = component.process.guard_pid if component.process else None
        what, kind = f"was lost: its guard (pid {guard}) was killed, and the role with it", CauseKind.GUARD_LOST
        if end.problem:
            what = f"was given up: {end.problem}"
        elif component.address.nodes:
            what = f"was lost: its step (srun, pid {guard}) ended without a report"
    elif end.guard_signal is not None and component.address.nodes:
        what, kind = f"was ended by Slurm ({signal_name(end.guard_signal)} to its step)", CauseKind.CANCELLED
    elif end.clean:
        what, kind = "exited with code 0, but the run was not over", CauseKind.EARLY_EXIT
    elif worker := _find_dead_worker(logs):
        rank, signum = worker
        what = _lost_rank(rank, signum)
    return Cause(
        kind=kind,
        time_s=end.time_s,
        message=f"{component.label} {what}",
        role=component.role.value,
        replica=component.replica,
        rank=rank,
        exit_code=end.exit_code if signum is None else None,
        signal=signum,
        node=end.node,
    )


def name_lost_rank(cause: Cause, component: Component, logs: Sequence[Path]) -> Cause:
    """Return the cause with the rank that the others of a replica have lost; ``cause`` itself if that is unknown.

    The launcher of the ranks names it in the log of its node, later than ranks of other nodes complain.

    Parameters
    ----------
    cause:
        Failure that one of the other ranks reported (``secondary``).
    component:
        The replica, all of whose processes have ended.
    logs:
        Logs of its tasks.
    """
    primary = msgspec.structs.replace(cause, error="", traceback="", secondary=False)
    if worker := _find_dead_worker(logs):
        rank, signum = worker
        message = f"{component.label} {_lost_rank(rank, signum)}"
        return msgspec.structs.replace(primary, message=message, rank=rank, signal=signum)
    # no launcher named a rank: its node may have gone with guard, launcher and ranks
    silent = component.process.silent if component.process is not None else []
    nodes = component.address.nodes
    if silent and nodes:
        names = ", ".join(sorted({nodes[task * len(nodes) // len(logs)] for task in silent}))
        message = f"{component.label} was lost on {names}: the guard there was killed, and its ranks with it"
        return msgspec.structs.replace(primary, kind=CauseKind.GUARD_LOST, message=message)
    return cause


def _find_dead_worker(logs: Sequence[Path]) -> tuple[int, int] | None:
    """Return rank and signal of a worker that was killed, from the first log whose launcher reports one."""
    return next((worker for log in logs if (worker := find_dead_worker(_tail(log)))), None)


def _lost_rank(rank: int, signum: int) -> str:
    return f"lost its rank {rank}, which {describe_end(None, signum)}"


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _LOG_TAIL_BYTES))
            return stream.read()
    except OSError:
        return b""
