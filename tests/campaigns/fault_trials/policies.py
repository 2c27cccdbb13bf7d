"""The faults and their policies, written down before anything is done: what must follow, and what ``why`` must name."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

FLOOR_S = 20.0
"""A role that has work and does nothing for so long is said to hang, in these runs."""


class Fault(NamedTuple):
    """What is done to what.

    Attributes
    ----------
    how, what:
        ``kill`` or ``stop`` a process of a role, ``print`` into the stream of its guard, ``copy`` the run directory and
        cancel and remove the copy, ``file`` (writing fails for some seconds), ``share`` (reading hangs), an order to an
        ``environment`` or an engine (``answers``, ``cut``, ``weights``), a ``stranger`` at a port, ``squeue`` that is
        wrong, or an order to Slurm.
    policy:
        What must follow, where several are right with ``|`` between: ``restart`` in place, ``attempt`` (the next one,
        where failures are retried; else the end), ``end``, ``requeue``, or ``nothing`` (the run goes on).
    why:
        Pattern of what ``hpcrl why`` must say; empty where the run goes on.
    seconds:
        How long the fault lasts, where it passes by itself.
    spec:
        Of a file, for tests/faults.c; ``{run}`` stands for the name of the run.
    during:
        Of a file that is only used at a start: what makes one while it fails. A role that is killed, or ``resume`` of a
        run whose supervisor was killed.
    order:
        Of what an environment or an engine does wrong (`inside/`), the order that it gets.
    said:
        Pattern of what ``hpcrl why --events`` and ``hpcrl status`` must say where the run goes on; empty: nothing.
    counted:
        Which of the orchestrator's counters must have grown where the run goes on; empty: none.
    """

    how: str
    what: str
    policy: str
    why: str
    seconds: float = 0.0
    spec: str = ""
    during: str = ""
    order: Mapping[str, Any] = MappingProxyType({})
    said: str = ""
    counted: str = ""

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
        # a run that was ended before its resume has another cause now
        "no start": "FAILED",
        "refused": "refused",
        "attempt": "next attempt" if retries or fault.during == "resume" else end,
    }
    return {following[policy] for policy in fault.policy.split("|")}


_PROCESSES = (
    Fault("kill", "engine", "restart", r"{role} {replica} was killed by SIGKILL"),
    Fault("stop", "engine", "restart", r"{role} {replica} hangs: .*stopped by a signal: pid .*{pid}"),
    Fault("kill", "trainer rank", "attempt", r"trainer 0.* was killed by SIGKILL"),
    Fault("stop", "trainer rank", "attempt", r"trainer 0 hangs: .*stopped by a signal: pid .*{pid}"),
    Fault("kill", "orchestrator", "attempt", r"orchestrator 0 was killed by SIGKILL"),
    Fault("stop", "orchestrator", "attempt", r"orchestrator 0 hangs: .*stopped by a signal: pid .*{pid}"),
    Fault(
        "kill",
        "guard of engine",
        "restart",
        r"guard of {role} {replica}|{role} {replica}.*guard|{role} {replica} was lost: its step",
    ),
    Fault("kill", "guard of trainer", "attempt", r"guard of trainer 0|trainer 0.*guard"),
    Fault("stop", "guard of engine", "nothing", "", 1.5 * FLOOR_S),
    # a site's programs print into the steps of roles: nothing of it is for us
    Fault("print", "guard of engine", "nothing", "", 2.0),
    Fault("print", "guard of trainer", "nothing", "", 2.0),
    # a copy of the run directory has the run's id, and nothing that is done to it is done to the run
    Fault("copy", "run", "nothing", "", 2.0),
    Fault("kill", "supervisor", "end", r"supervisor"),
    Fault("stop", "supervisor", "nothing", "", 1.5 * FLOOR_S),
)

_FULL = "takes no more|is full"
_SAID = {
    "ESTALE": "the handle is stale",
    "EDQUOT": f"the quota is used up|{_FULL}",
    "ENOSPC": f"no space is left|{_FULL}",
}
_ERRORS = tuple(_SAID)
#: reports: whatever fails, the run goes on and catches up
_REPORTS = ("status.json", "events/", "metrics/", "progress/", "fleet.json", "rollouts/", "logs/")
#: what engines and trainer exchange: a publication is tried again for longer than these faults last
_WEIGHTS = "weights/"
#: leases of engines: they are tried again for longer than the fault lasts
_READERS = "weights/.readers/"
#: used where a role starts: an engine is started again and again, each time in its restart policy
_ROLE_STARTS = ("ready/", "plan.json", "token", "endpoints.json")
#: used where an attempt starts or ends. Where the next one cannot begin, the run ends and says why
_ATTEMPT_STARTS = ("restore.json", "ready/", "failures/", "endpoints.json", "run.json", "attempts/", "checkpoints/")
#: used where a run is resumed: the command says why it is refused, or the attempt why it cannot begin
_RESUMES = ("run.json", "restart.json", "snapshots/", "submitit/", "plan.json", "status.json", "attempts/")
_START_S = 10.0


def _files() -> tuple[Fault, ...]:
    faults = []
    for error in _ERRORS:
        number = getattr(errno, error)
        # a handle is stale for whoever uses it; a full quota refuses what makes or grows files
        operation = "any" if error == "ESTALE" else "change"
        # as the system says it, and as commands and the cause of a full disk say it
        said = re.escape(os.strerror(number)) + "|" + _SAID[error]

        def faults_of(
            files: tuple[str, ...], policy: str, why: str = "", seconds: float = 5.0, during: str = ""
        ) -> Iterator[Fault]:
            for file in files:
                what = f"{file} {error}" + (f" while {during}" if during else "")  # noqa: B023
                yield Fault("file", what, policy, why, seconds, _spec(operation, number, file), during)  # noqa: B023

        faults += faults_of((*_REPORTS, _READERS), "nothing")
        # an engine that cannot read a version in time is started again
        faults += faults_of((_WEIGHTS,), "nothing|restart", rf"{said}|engine \d")
        # a save that fails is said, and training goes on
        faults += faults_of(("checkpoints/",), "nothing|attempt", rf"{said}|FencedError")
        killed = r"{role} {replica} was killed by SIGKILL"
        faults += faults_of(_ROLE_STARTS, "restart", rf"{killed}|{said}", during="kill engine")
        killed = r"trainer 0.* was killed by SIGKILL"
        faults += faults_of(_ATTEMPT_STARTS, "attempt|end", rf"{killed}|{said}", _START_S, "kill trainer rank")
        faults += faults_of(_RESUMES, "attempt|no start|refused", said, _START_S, "resume")
    return tuple(faults)


def _spec(operation: str, number: int, file: str) -> str:
    """A directory of the run with all that is in it, or a single file, with its temporary names, too."""
    if file in ("progress/", "logs/", "ready/", "failures/"):
        path = f"/{file}"  # of any attempt
    else:
        # not tokenizer.json
        path = f"/{{run}}/{file}" if file.endswith("/") or file == "token" else file
    return f"op={operation} errno={number} path={path}"


def _environments() -> Iterator[Fault]:
    """What code of others gives: a rollout is lost and counted, and the run goes on where it is a share of them."""
    share, seconds = 0.3, 4.0

    def fault(what: str, said: str, counted: str = "dropped_environment", share: float = share) -> Fault:
        order = {"kind": "environment", "what": what, "share": share}
        return Fault("environment", what, "nothing", "", seconds, order=order, said=said, counted=counted)

    # of each cause the first is shown, which may be that of an earlier fault
    for what in ("NaN", "infinity", "minus infinity", "text", "nothing", "a huge number"):
        yield fault(what, r"environment reverse: .*gave an unusable reward(.|\n)*its reward is ")
    yield fault("NaN part", r"part 'letters' was left out", "refused_parts")
    yield fault(
        "raises", r"environment reverse: .*raised an exception(.|\n)*KeyError: 'stdout', at .*fault_trial_words"
    )
    yield fault("exits", r"environment reverse: .*lost their process", share=0.15)
    order = {"kind": "environment", "what": "raises", "share": 1.0}
    why = r"(?s)environment 'reverse'.*KeyError: 'stdout'"
    yield Fault("environment", "raises each time", "attempt|end", why, order=order)


_DAMAGED = (
    "truncated",
    "token -1",
    "token beyond the vocabulary",
    "more tokens than asked for",
    "log-probability 55",
    "log-probability NaN",
    "log-probability -infinity",
    "fewer log-probabilities than tokens",
    "half a number",
    "another type",
    "no choice",
    "a version that is none",
)
UPDATE_S = 12.0
"""Timeout of a weight update in these runs."""


def _engines() -> Iterator[Fault]:
    """What an engine answers, and what becomes of its weights."""
    for what in _DAMAGED:
        order = {"kind": "answers", "what": what}
        broken = r"{role} {replica} (?s:.*)gave \d+ unusable answers"
        yield Fault("answers", f"of engine, all: {what}", "restart", broken, order=order)
        once = {**order, "count": 2}
        # two are two flipped bits
        yield Fault("answers", f"of engine, two: {what}", "nothing", "", 3.0, order=once, counted="unusable_answers")
    cut = {"kind": "cut", "count": 3}
    yield Fault("cut", "update of engine", "nothing|restart", r"{role} {replica} ", 6.0, order=cut)
    for what in ("not loaded", "altered"):
        wrong = r"{role} {replica} computes with other weights than those of version"
        yield Fault("weights", f"of engine {what}", "restart", wrong, order={"kind": "weights", "what": what})
    yield Fault("stranger", "at engine", "nothing", "", 4.0)
    yield Fault("stranger", "at orchestrator", "nothing", "", 4.0)
    # reads begin, and end when the update that they were for has been given up
    hangs = f"op=read delay_us={int((UPDATE_S + 6.0) * 1e6)} count=2 path=/{{run}}/weights/v"
    read = r"{role} {replica} "
    yield Fault("share", "hangs", "nothing|restart", "", 2.0 * UPDATE_S, hangs)
    yield Fault("share", "hangs for engine", "nothing|restart", read, 2.0 * UPDATE_S, hangs + " who={role}-{replica}")


FOREIGN = (*_environments(), *_engines())
LOCAL = (*_PROCESSES, *_files(), *FOREIGN)
SLURM = (
    *LOCAL,
    # Slurm's answers are late, lack the job, or do not come: nothing that is not known has ended
    *(Fault("squeue", what, "nothing", "", 25.0) for what in ("lags", "leaves the job out", "fails")),
    Fault("node", "of engine", "requeue", r"node {node} went down"),
    Fault("node", "of trainer", "requeue", r"node {node} went down"),
    Fault("scancel", "job", "end", r"(?i)cancelled|ended by Slurm"),
    Fault("preempt", "job", "requeue", r"(?i)preempt"),
    # the step of the next life is never started, as with "Requested nodes are busy"; then srun works again
    Fault("srun hangs", "engine", "restart", r"{role} {replica} (was not ready|did not begin)", 30.0),
    # the guard and its slurmstepd do not answer while the job has to leave: the requeue must not be missed. Slurm waits
    # for such a node, until it is back (as here) or declared down
    Fault("unreachable", "guard of engine", "requeue", r"(?i)preempt", 30.0),
    Fault("away", "slurmctld", "nothing", "", 180.0),
)
