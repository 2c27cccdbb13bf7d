"""Faults of the small reference run, by kind: those of all Slurm runs that fit it, and those of the parts it has more.

Its engines are prefill and decode, it has a router, a pool of KV, workers of environments and daemons of sandboxes, and
its environment is ``kind: swe``, which takes no orders.
"""

from __future__ import annotations

import random

from fault_trials.policies import SLURM, Fault

_SECONDS = 10.0
_OWN = (
    Fault("kill", "router", "restart", r"{role} {replica} was killed by SIGKILL"),
    Fault("stop", "router", "restart", r"{role} {replica} hangs: "),
    # engines compute prompts anew until the pool is back
    Fault("kill", "store", "restart", r"{role} {replica} was killed by SIGKILL"),
    Fault("kill", "env worker", "restart", r"{role} {replica} was killed by SIGKILL"),
    Fault("stop", "env worker", "restart", r"{role} {replica} hangs: "),
    # its worker starts another one; rollouts that had sandboxes there are begun anew
    Fault("kill", "sandboxd", "nothing", ""),
    Fault("node", "of prefill", "requeue", r"node {node} went down"),
    Fault("node", "of decode", "requeue", r"node {node} went down"),
    Fault("node", "of env worker", "requeue", r"node {node} went down"),
    # the warning before the time limit: the run saves, and goes on in its next job
    Fault("warn", "job of its time limit", "requeue", ""),
    # what lies on the share is damaged where it can be: an engine that has not read it yet refuses it
    Fault("version", "is damaged", "nothing|restart|attempt", r"v\d+|version \d+"),
    Fault("share", "is slow", "nothing|restart", "", _SECONDS, "op=read delay_us=100000 path=/{run}/"),
)


def faults_by_kind() -> dict[str, tuple[Fault, ...]]:
    """Return the faults; one kind is what is done (of files: how they fail), to one part."""
    found: dict[str, list[Fault]] = {}
    for fault in (*SLURM, *_OWN):
        if fault.how == "environment" or fault.name == "node of engine":
            continue
        # a prefill engine gives no tokens, so only decode engines can give damaged ones
        what = fault.what.replace("engine", "decode") if fault.how == "answers" else fault.what
        fault = fault._replace(what=what)  # noqa: PLW2901
        found.setdefault(_kind(fault), []).append(fault)
    return {kind: tuple(faults) for kind, faults in found.items()}


def _kind(fault: Fault) -> str:
    if fault.how == "file":
        return f"file {fault.what.split()[1]}"
    return fault.how if fault.how in ("answers", "cut", "weights", "squeue") else fault.name


class Deck:
    """Every kind once before any comes again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._kinds = rng, faults_by_kind()
        self._left: list[str] = []

    def draw(self) -> Fault:
        """Return the next fault."""
        if not self._left:
            self._left = sorted(self._kinds)
            self._rng.shuffle(self._left)
        return self._rng.choice(self._kinds[self._left.pop()])
