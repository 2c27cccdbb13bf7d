"""The faults and their policies, written down before anything is done: what must follow, and what ``why`` must name."""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

__all__ = ["FLOOR_S", "LOCAL", "SLURM", "Fault", "expected_outcomes"]

FLOOR_S = 20.0
"""A role that has work and does nothing for so long is said to hang, in these runs."""


class Fault(NamedTuple):
    """What is done to what.

    Attributes
    ----------
    how, what:
        ``kill`` or ``stop`` a process of a role, ``file`` (writing fails for some seconds), or an order to Slurm.
    policy:
        What must follow, where several are right with ``|`` between: ``restart`` in place, ``attempt`` (the next one,
        where failures are retried; else the end), ``end``, ``requeue``, or ``nothing`` (the run goes on).
    why:
        Pattern of what ``hpcrl why`` must say; empty where the run goes on.
    seconds:
        How long the fault lasts, where it passes by itself.
    spec:
        Of a file, for tests/faults.c; ``{run}`` stands for the name of the run.
    """

    how: str
    what: str
    policy: str
    why: str
    seconds: float = 0.0
    spec: str = ""

    @property
    def name(self) -> str:
        return f"{self.how} {self.what}"


def expected_outcomes(fault: Fault, *, retries: bool) -> set[str]:
    """The outcomes that a policy allows."""
    end = {"supervisor": "LOST", "job": "CANCELLED"}.get(fault.what, "FAILED")
    following = {
        "restart": "restarted",
        "requeue": "next attempt",
        "nothing": "went on",
        "end": end,
        "attempt": "next attempt" if retries else end,
    }
    return {following[policy] for policy in fault.policy.split("|")}


_PROCESSES = (
    Fault("kill", "engine", "restart", r"{role} {replica} was killed by SIGKILL"),
    Fault("stop", "engine", "restart", r"{role} {replica} hangs: .*stopped by a signal: pid .*{pid}"),
    Fault("kill", "trainer rank", "attempt", r"trainer 0.* was killed by SIGKILL"),
    Fault("stop", "trainer rank", "attempt", r"trainer 0 hangs: .*stopped by a signal: pid .*{pid}"),
    Fault("kill", "orchestrator", "attempt", r"orchestrator 0 was killed by SIGKILL"),
    Fault("stop", "orchestrator", "attempt", r"orchestrator 0 hangs: .*stopped by a signal: pid .*{pid}"),
    Fault("kill", "guard of engine", "restart", r"guard of {role} {replica}|{role} {replica}.*guard"),
    Fault("kill", "guard of trainer", "attempt", r"guard of trainer 0|trainer 0.*guard"),
    Fault("stop", "guard of engine", "nothing", "", 1.5 * FLOOR_S),
    Fault("kill", "supervisor", "end", r"supervisor"),
    Fault("stop", "supervisor", "nothing", "", 1.5 * FLOOR_S),
)

_ERRORS = ("ESTALE", "EDQUOT", "ENOSPC")
#: reports: whatever fails, the run goes on and catches up
_REPORTS = ("status.json", "events/", "metrics/", "progress/", "fleet.json", "rollouts/")
#: what engines and trainer exchange. A publication that fails ends the attempt with the reason, because engines must
#: get what is trained
_WEIGHTS = "weights/"
#: leases of engines: they are tried again for longer than the fault lasts
_READERS = "weights/.readers/"


def _files() -> tuple[Fault, ...]:
    faults = []
    for error in _ERRORS:
        number = getattr(errno, error)
        # a handle is stale for whoever uses it; a full quota refuses what makes or grows files
        operation = "any" if error == "ESTALE" else "change"
        said = re.escape(os.strerror(number))
        for file in (*_REPORTS, _READERS):
            faults.append(Fault("file", f"{file} {error}", "nothing", "", 5.0, _spec(operation, number, file)))
        # a save that fails is said, and training goes on
        spec = _spec(operation, number, "checkpoints/")
        faults.append(Fault("file", f"checkpoints/ {error}", "nothing|attempt", rf"{said}|FencedError", 5.0, spec))
        spec = _spec(operation, number, _WEIGHTS)
        # where there is no space the next attempt would find none either: the run ends, and says so
        policy = "nothing|restart|attempt" + ("" if error == "ESTALE" else "|end")
        faults.append(Fault("file", f"{_WEIGHTS} {error}", policy, rf"{said}|is full", 5.0, spec))
    return tuple(faults)


def _spec(operation: str, number: int, file: str) -> str:
    """Part of the path with the name of the run in it; that of a single file matches its temporary name, too."""
    path = (
        f"/{{run}}/{file}" if file in ("events/", "metrics/", "rollouts/", "checkpoints/", _WEIGHTS, _READERS) else file
    )
    return f"op={operation} errno={number} path={path}"


LOCAL = (*_PROCESSES, *_files())
SLURM = (
    *LOCAL,
    Fault("node", "of engine", "requeue", r"node {node} went down"),
    Fault("node", "of trainer", "requeue", r"node {node} went down"),
    Fault("scancel", "job", "end", r"(?i)cancelled|ended by Slurm"),
    Fault("preempt", "job", "requeue", r"(?i)preempt"),
    # the step of the next life is never started, as with "Requested nodes are busy"; then srun works again
    Fault("srun hangs", "engine", "restart", r"{role} {replica} (was not ready|did not start|.*never)", 30.0),
    # the guard and its slurmstepd do not answer while the job has to leave: the requeue must not be missed
    Fault("unreachable", "guard of engine", "requeue", r"(?i)preempt"),
    Fault("away", "slurmctld", "nothing", "", 180.0),
)
