"""Owners of weight-update sessions of engines, so that an abandoned session can be taken over.

The orchestrator numbers its sessions, and every call of a session carries the number. An engine has one session at a
time. A new session ends the present one. A session that is older than the present one comes from an orchestrator that
was presumed dead, and is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SESSION = "session"
"""Key of the owner in the bodies of the update calls."""


class SessionOwner(NamedTuple):
    """Owner of a session; later ones are greater. ``[attempt, number]`` in JSON.

    Attributes
    ----------
    attempt:
        Attempt of the run.
    number:
        Number of the session, which grows within an attempt, also across restarts of the orchestrator.
    """

    attempt: int
    number: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.number}"


def read_owner(value: Any) -> SessionOwner | None:
    """Read the owner from the body of a call; None where the caller has left it out.

    Raises
    ------
    ValueError
        It is something else.
    """
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(part) is not int for part in value):
        raise ValueError(f"{SESSION} must be [attempt, number], not {value!r}")
    return SessionOwner(*value)
