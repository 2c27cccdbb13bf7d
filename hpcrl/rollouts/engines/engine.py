"""One engine as the orchestrator knows it: its state, and the only ways in which that changes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from hpcrl.rollouts.engines.client import EngineClient, EngineError

__all__ = ["Engine"]

_T = TypeVar("_T")


class Engine:
    """One engine and what is known of it. Others read; what happens to it is told by the methods.

    ::

        serves a version ──suspect──> silent ──answered──> serves it again
              │                         │
              └──────────lose───────────┴──> away ──answered──> there, without a version ──serve──> serves

    Weights change between `begin_exchange` and `end_exchange`; who starts something new waits meanwhile (`opened`).

    Parameters
    ----------
    client:
        How it is reached.
    away:
        Whether it is gone from the beginning.
    """

    def __init__(self, client: EngineClient, *, away: bool = False) -> None:
        self.client = client
        self._version, self._load, self._incarnation = -1, 0, 0
        self._open_for_new = asyncio.Event()
        self._silent_since_s: float | None = None
        self._away, self._refused, self._stuck = away, False, False
        self._proved_s, self._why = -math.inf, ""
        self._shunned_until_s = -math.inf
        self._work: set[asyncio.Task[Any]] = set()

    # -- what is known

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def version(self) -> int:
        """Policy version that it serves; -1 before the first, and after it went away."""
        return self._version

    @property
    def load(self) -> int:
        """Rollouts assigned to it."""
        return self._load

    @property
    def incarnation(self) -> int:
        """Counts how often it went away, and was found to be another process."""
        return self._incarnation

    @property
    def away(self) -> bool:
        """It is gone or does not answer; what it was given is forgotten."""
        return self._away

    @property
    def answers(self) -> bool:
        """Whether nothing is known against it: it is not away, and its last request or look was answered."""
        return not self._away and not self.suspected

    @property
    def suspected(self) -> bool:
        """Whether a request or a look was not answered, and no look was since."""
        return self._silent_since_s is not None

    @property
    def serving(self) -> bool:
        """Whether something may be sent to it."""
        return self._version >= 0 and self.answers

    @property
    def open_for_new(self) -> bool:
        """Whether its weights do not change just now: who starts while they do could not say whose cache it may use."""
        return self._open_for_new.is_set()

    @property
    def shunned(self) -> bool:
        """Return whether it must not be used yet, even where it says that it is healthy."""
        return time.monotonic() < self._shunned_until_s

    @property
    def stuck(self) -> bool:
        """It has requests and samples nothing: nothing new is sent there while another engine serves."""
        return self._stuck

    @property
    def why(self) -> str:
        """What was wrong with it last."""
        return self._why

    @property
    def proved_s(self) -> float:
        """When it was seen last with the weights that we gave it, by the monotonic clock."""
        return self._proved_s

    async def opened(self) -> None:
        """Wait until its weights do not change. It may be gone by then."""
        await self._open_for_new.wait()

    # -- what it is given

    def assign(self, rollouts: int) -> None:
        """So many rollouts more are on it (fewer where negative)."""
        self._load += rollouts

    def measured(self, load: int) -> None:
        """A router has counted what is on it."""
        self._load = load

    async def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do something with the engine, for as long as it does not go away.

        Raises
        ------
        EngineError
            It went away meanwhile (``unreachable``), or what ``work`` raises.
        """
        incarnation, task = self._incarnation, asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if incarnation == self._incarnation or (current is not None and current.cancelling()):
                raise
            raise EngineError(f"{self.name}: went away during a request", unreachable=True) from None

    # -- what happens to it

    def serve(self, version: int, *, proved_s: float) -> None:
        """It has a version, and had it at ``proved_s`` at the latest."""
        self._version, self._proved_s, self._why = version, proved_s, ""

    def follow(self, version: int) -> None:
        """It stands for other engines, and so serves what they do (-1 where they serve nothing)."""
        self._version = version

    def proved(self, at_s: float) -> None:
        """It was asked at ``at_s``, and has the weights that we gave it."""
        self._proved_s = at_s

    def begin_exchange(self) -> None:
        """Its weights change from now on."""
        self._open_for_new.clear()

    def end_exchange(self) -> None:
        """They do not change any more, whether it has the new ones or not."""
        self._open_for_new.set()

    def suspect(self) -> None:
        """A request failed there: nothing more is sent before it was looked at."""
        self._silent_since_s = time.monotonic()

    def silent(self, *, refused: bool) -> float:
        """It did not answer when it was looked at; for how many seconds so far.

        Parameters
        ----------
        refused:
            Nobody listened: whoever does next is another process.
        """
        now = time.monotonic()
        self._silent_since_s = self._silent_since_s or now
        self._refused |= refused
        return now - self._silent_since_s

    def absent(self) -> bool:
        """It does not answer, and loses nothing by it; whether that is news."""
        news, self._away = not self._away, True
        return news

    def answered(self) -> bool:
        """It answered when it was looked at; whether it had been away, and is back."""
        self._silent_since_s, back = None, self._away
        if back:
            self._away = False
            self._incarnation += self._refused
            self._refused = False
        return back

    def lose(self, why: str) -> None:
        """It is not there, or has lost its weights: its calls are cut, and it serves nothing until it has a version."""
        self._why = why
        self.leave()
        self.cut()

    def shun(self, seconds: float) -> None:
        """Do not take it back for so long, whatever it says of its health."""
        self._shunned_until_s = time.monotonic() + seconds

    def leave(self) -> None:
        """It gets nothing new; what it works on may still end there."""
        self._away, self._version = True, -1
        self._incarnation += 1
        self._open_for_new.set()  # who waits for it looks again, and goes elsewhere

    def cut(self) -> None:
        """Cut its calls."""
        for task in list(self._work):
            task.cancel()

    def forget(self) -> None:
        """What it works on is worth nothing any more: calls are cut, and answers are not of who was asked."""
        self._incarnation += 1
        self.cut()

    def note_stuck(self, stuck: bool) -> None:
        """Whether it samples nothing although it has requests."""
        self._stuck = stuck
