"""States of nodes, in Slurm's words and signs: one table of what each means for a job.

A state is a word and flags (``IDLE+CLOUD+POWERED_DOWN``), with signs behind it in some commands (``idle~``).
"""

from __future__ import annotations

from collections.abc import Set

_SIGNS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
"""Signs after a node's state (sinfo(1), node state codes)."""

_OTHER_NAMES = {
    "ALLOC": "ALLOCATED",
    "BOOT": "POWERING_UP",
    "COMP": "COMPLETING",
    "DRNG": "DRAINING",
    "FAILG": "FAILING",
    "FUTR": "FUTURE",
    "INVAL": "INVALID",
    "INVALID_REG": "INVALID",
    "MAINT": "MAINTENANCE",
    "MIX": "MIXED",
    "NO_RESPOND": "NOT_RESPONDING",
    "PLND": "PLANNED",
    "POW_DN": "POWERING_DOWN",
    "POW_UP": "POWERING_UP",
    "POWER_UP": "POWERING_UP",
    "REBOOT": "REBOOT_REQUESTED",
    "RESV": "RESERVED",
    "UNK": "UNKNOWN",
}
"""Shorter and older names of states."""

_WORKS = frozenset({"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "RESERVED", "PLANNED", "MAINTENANCE"})
"""States of a node that accepts jobs, now or when others have ended. A reserved node accepts the reservation's jobs."""

_BROKEN = frozenset({"DOWN", "ERROR", "FAIL", "FAILING"})
"""States in which an administrator must act and jobs on the node are lost."""

_KEPT_AWAY = frozenset({"DRAIN", "DRAINING", "DRAINED", "INVALID", "UNKNOWN", "FUTURE", "REBOOT_REQUESTED"})
"""States in which no job starts until an administrator, or the node itself, has acted."""

_SILENT_BY_ORDER = frozenset({"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "REBOOT_ISSUED"})
"""States in which a node is expected not to respond: Slurm has switched it off, or starts it."""


def parse_node_state(text: str) -> frozenset[str]:
    """Return the words and flags of a state as ``scontrol`` or ``sinfo`` writes it, signs as their flags."""
    states: set[str] = set()
    for part in text.strip().upper().split("+"):
        word = part.rstrip("".join(_SIGNS))
        states |= {_OTHER_NAMES.get(word, word), *(_SIGNS[sign] for sign in part[len(word) :])}
    return frozenset(states - {""})


def jobs_can_run(states: Set[str]) -> bool:
    """Return whether jobs run on a node of these states, or can start there later without an administrator.

    A node that Slurm has powered down, or that it is powering up or down, is one of them.
    """
    return bool(states & _WORKS) and not states & (_BROKEN | _KEPT_AWAY) and not _silent(states)


def jobs_are_lost(states: Set[str]) -> bool:
    """Return whether jobs on a node of these states are lost. A drained node continues until its jobs end."""
    return bool(states & _BROKEN) or _silent(states)


def _silent(states: Set[str]) -> bool:
    return "NOT_RESPONDING" in states and not states & _SILENT_BY_ORDER
