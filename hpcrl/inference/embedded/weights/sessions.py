"""The open weight-update session. There is at most one, and the next one ends it."""

from __future__ import annotations

import logging
import threading
from typing import Generic, TypeVar

from hpcrl.weights.session import SessionOwner

_log = logging.getLogger(__name__)

T = TypeVar("T")


class UpdateOrderError(Exception):
    """A call of the update session came out of order; nothing was changed."""


class Session(Generic[T]):
    """A session: whose it is, and what was read in it.

    Attributes
    ----------
    ready:
        Version that `Sessions.close` hands to the served weights; None if nothing was read.
    """

    def __init__(self, owner: SessionOwner | None) -> None:
        self.owner, self._ended = owner, threading.Event()
        self.ready: T | None = None

    def __str__(self) -> str:
        return "without an owner" if self.owner is None else str(self.owner)

    def check_open(self) -> None:
        """Stop the work of a session that has ended meanwhile.

        Raises
        ------
        UpdateOrderError
            It has ended.
        """
        if self._ended.is_set():
            raise UpdateOrderError(f"session {self} has ended: another one has begun, or its caller has gone")

    def end(self) -> None:
        """End the session: reads that still run for it stop at the next tensor, and what was read is dropped."""
        self._ended.set()
        self.ready = None


class Sessions(Generic[T]):
    """The open session, and the newest owner so far. Calls may come from any thread, and wait for nothing."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._open: Session[T] | None = None
        self._newest: SessionOwner | None = None

    def start(self, owner: SessionOwner | None) -> None:
        """Begin a session; one that is open ends.

        Raises
        ------
        UpdateOrderError
            A session of a later owner has begun before: this caller was thought dead.
        """
        with self._mutex:
            if owner is not None and self._newest is not None and owner < self._newest:
                raise UpdateOrderError(f"session {owner} is older than session {self._newest}, which has begun before")
            if self._open is not None:
                _log.warning("the weight update of session %s was not finished; another one begins", self._open)
                self._open.end()
            self._open, self._newest = Session(owner), owner or self._newest

    def of(self, owner: SessionOwner | None, call: str) -> Session[T]:
        """Return the open session of ``owner`` for a call.

        Raises
        ------
        UpdateOrderError
            No session is open, or that of another owner.
        """
        with self._mutex:
            session = self._open
        if session is None:
            raise UpdateOrderError(f"call /start_weight_update before {call}")
        if session.owner != owner:
            theirs = "a session without an owner" if owner is None else f"session {owner}"
            raise UpdateOrderError(f"{call} of {theirs} came while session {session} is open")
        return session

    def abandon(self, owner: SessionOwner | None) -> None:
        """End the open session, where it is that of ``owner``: its caller does not wait for it any more."""
        with self._mutex:
            if self._open is not None and self._open.owner == owner:
                self._open.end()
                self._open = None

    def end(self, session: Session[T]) -> None:
        """End a session, where it is still open."""
        with self._mutex:
            session.end()
            if self._open is session:
                self._open = None

    def end_all(self) -> None:
        """End the open session, whichever owner began it."""
        with self._mutex:
            if self._open is not None:
                self._open.end()
                self._open = None
