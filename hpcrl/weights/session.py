"""Who has begun a weight update of an engine: sessions have an owner, so that one that nobody ends can be taken over.

The orchestrator numbers its sessions, and every call of a session carries the number. An engine has one session at a
time. The next one ends it, unless that is older than a session that has begun since: then it comes from an orchestrator
that was thought dead, and is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["SESSION", "SessionOwner", "read_owner"]

SESSION = "session"
"""Key of the owner in the bodies of the update calls."""


class SessionOwner(NamedTuple):
    """The owner of a session; later ones are greater. ``[attempt, number]`` in JSON.

    Attributes
    ----------
    attempt:
        Of the run.
    number:
        Of the session, growing within an attempt, also from one process of the orchestrator to the next.
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
