"""One engine as the orchestrator knows it: its state, and the only ways in which that changes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from hpcrl.rollouts.engines.client import EngineClient, EngineError

_T = TypeVar("_T")


class Engine:
    """State of one engine. Other parts read it; methods are the only way to change it.

    ::

        serves a version ──suspect──> silent ──answered──> serves it again
              │                         │
              └──────────lose───────────┴──> away ──answered──> there, without a version ──serve──> serves

    Weights change between `begin_exchange` and `end_exchange`; new rollouts wait meanwhile (`opened`).

    Parameters
    ----------
    client:
        Client of the engine.
    away:
        Whether it is away at the beginning.
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
        """Return the policy version that it serves; -1 before the first, and after it went away."""
        return self._version

    @property
    def load(self) -> int:
        """Return the number of rollouts assigned to it."""
        return self._load

    @property
    def incarnation(self) -> int:
        """Return how often it went away or was found to be another process."""
        return self._incarnation

    @property
    def away(self) -> bool:
        """Return whether it is gone or does not answer; its requests are forgotten then."""
        return self._away

    @property
    def answers(self) -> bool:
        """Return whether the engine is not away and answered its last request or probe."""
        return not self._away and not self.suspected

    @property
    def suspected(self) -> bool:
        """Return whether a request or probe was not answered and no later probe was."""
        return self._silent_since_s is not None

    @property
    def serving(self) -> bool:
        """Return whether requests may be sent to the engine."""
        return self._version >= 0 and self.answers

    @property
    def open_for_new(self) -> bool:
        """Return whether the engine accepts new rollouts, because its weights are not changing.

        A rollout that starts while weights change could not know which version's prefix cache it may use.
        """
        return self._open_for_new.is_set()

    @property
    def shunned(self) -> bool:
        """Return whether it must not be used yet, even where it says that it is healthy."""
        return time.monotonic() < self._shunned_until_s

    @property
    def stuck(self) -> bool:
        """Return whether it has requests and samples nothing: it gets nothing new while another engine serves."""
        return self._stuck

    @property
    def why(self) -> str:
        """Return the reason for which the engine was last lost."""
        return self._why

    @property
    def proved_s(self) -> float:
        """Return when the engine last proved that it runs the published weights, in seconds of the monotonic clock."""
        return self._proved_s

    async def opened(self) -> None:
        """Wait until its weights are not changing. It may be gone by then."""
        await self._open_for_new.wait()

    # -- what it is given

    def assign(self, rollouts: int) -> None:
        """Add ``rollouts`` (negative: remove) to the number assigned to it."""
        self._load += rollouts

    def measured(self, load: int) -> None:
        """Set the load that a router has counted for this engine."""
        self._load = load

    async def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await ``work`` with the engine, unless the engine goes away first.

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
            raise EngineError(f"{self.name}: the engine was lost during a request", unreachable=True) from None

    # -- what happens to it

    def serve(self, version: int, *, proved_s: float) -> None:
        """Set the version that the engine serves; it was proved at ``proved_s`` (monotonic seconds)."""
        self._version, self._proved_s, self._why = version, proved_s, ""

    def follow(self, version: int) -> None:
        """Set the version of an engine that represents others to what they serve; -1 where they serve nothing."""
        self._version = version

    def proved(self, at_s: float) -> None:
        """Record that at ``at_s`` (monotonic seconds) the engine had the published weights."""
        self._proved_s = at_s

    def begin_exchange(self) -> None:
        """Note that its weights change from now on."""
        self._open_for_new.clear()

    def end_exchange(self) -> None:
        """Note that the weights do not change any more, whether the engine has the new ones or not."""
        self._open_for_new.set()

    def suspect(self) -> None:
        """Suspect the engine after a failed request: nothing more is sent to it before the next probe."""
        self._silent_since_s = time.monotonic()

    def silent(self, *, refused: bool) -> float:
        """Record that a probe was not answered; return for how many seconds the engine has been silent.

        Parameters
        ----------
        refused:
            The connection was refused: the process that listens next is another one.
        """
        now = time.monotonic()
        self._silent_since_s = self._silent_since_s or now
        self._refused |= refused
        return now - self._silent_since_s

    def absent(self) -> bool:
        """Mark the engine as away without changing its weights; return whether it was not away before."""
        news, self._away = not self._away, True
        return news

    def answered(self) -> bool:
        """Record that a probe was answered; return whether the engine was away before."""
        self._silent_since_s, back = None, self._away
        if back:
            self._away = False
            self._incarnation += self._refused
            self._refused = False
        return back

    def lose(self, why: str) -> None:
        """Mark the engine as lost: cancel its calls; it serves nothing until it has a version again."""
        self._why = why
        self.leave()
        self.cut()

    def shun(self, seconds: float) -> None:
        """Avoid the engine for some seconds, whatever its health endpoint reports."""
        self._shunned_until_s = time.monotonic() + seconds

    def leave(self) -> None:
        """Stop sending new requests to the engine; requests in flight may still end there."""
        self._away, self._version = True, -1
        self._incarnation += 1
        self._open_for_new.set()  # waiting rollouts check again and move to another engine

    def cut(self) -> None:
        """Cancel its calls."""
        for task in list(self._work):
            task.cancel()

    def forget(self) -> None:
        """Discard the work in flight: cancel calls, and treat later answers as those of another incarnation."""
        self._incarnation += 1
        self.cut()

    def note_stuck(self, stuck: bool) -> None:
        """Set whether the engine samples nothing although it has requests."""
        self._stuck = stuck
