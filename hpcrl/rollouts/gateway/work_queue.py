"""Bounds the work that calls of programs do in one turn of the event loop.

When hundreds of connections are ready at once, asyncio runs all of their handlers before anything else. Rendering a
prompt or parsing an answer takes up to milliseconds, so that updates of weights, health and the dock would wait for all
of these handlers. A call therefore waits here before each such piece of work. A few pieces run in each turn of the
loop, and everything else that is ready runs between them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

_PER_TURN = 4
"""Pieces of work that begin in one turn of the loop: about three milliseconds of it. A turn itself takes some tens of
microseconds, so that more pieces would save little."""
_WINDOW = 4096
"""Number of latest waits of which percentiles are reported."""

_Waiter = tuple[asyncio.Future[None], float]


class QueueSummary(NamedTuple):
    """State of a `WorkQueue`.

    Attributes
    ----------
    waiting:
        Pieces of work that wait now.
    p99_s:
        99th percentile of the latest waits in seconds; 0 before the first. Work that begins at once has waited 0 s.
    waited_s:
        Sum of all waits in seconds.
    """

    waiting: int
    p99_s: float
    waited_s: float


class WorkQueue:
    """Lets a few pieces of work begin in each turn of the event loop. Used from one event loop.

    Work that ends a call comes before work that begins one: a call that has its answer takes memory until it is over.
    Within both, owners take turns, and the pieces of one owner keep their order.
    """

    def __init__(self, *, per_turn: int = _PER_TURN) -> None:
        """Begin empty; ``per_turn`` pieces of work begin in each turn of the loop."""
        self._per_turn = self._left = per_turn
        self._counting = False
        self._ending = _Lane()
        self._beginning = _Lane()
        self._waits: deque[float] = deque(maxlen=_WINDOW)
        self._waited_s = 0.0

    def __len__(self) -> int:
        """Return how many pieces of work wait."""
        return self._ending.length + self._beginning.length

    async def wait(self, owner: Hashable, *, ends_call: bool = False) -> None:
        """Wait until a piece of work may run: the caller does it at once, up to its next wait.

        Parameters
        ----------
        owner:
            The rollout. A rollout with many calls does not delay those of others.
        ends_call:
            The work is that of a call which the engine has answered.
        """
        if self._left and not len(self):
            self._take()
            self._waits.append(0.0)
            return
        lane = self._ending if ends_call else self._beginning
        done = asyncio.get_running_loop().create_future()
        lane.append(owner, (done, time.monotonic()))
        await done

    def summary(self) -> QueueSummary:
        """Return length and waits."""
        ordered = sorted(self._waits) or [0.0]
        return QueueSummary(len(self), ordered[int(0.99 * (len(ordered) - 1))], self._waited_s)

    def _take(self) -> None:
        self._left -= 1
        if not self._counting:
            # runs in the next turn of the loop
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Let the next pieces of work run, which they do in the next turn of the loop."""
        self._left, self._counting = self._per_turn, False
        now = time.monotonic()
        while self._left and len(self):
            done, since_s = (self._ending if self._ending.length else self._beginning).pop()
            if done.done():
                continue  # its call was cancelled
            done.set_result(None)
            self._waits.append(now - since_s)
            self._waited_s += now - since_s
            self._take()


class _Lane:
    """Waiting pieces of work by their owner, who take turns.

    Attributes
    ----------
    length:
        Number of pieces.
    """

    def __init__(self) -> None:
        self._owners: dict[Hashable, deque[_Waiter]] = {}
        self.length = 0

    def append(self, owner: Hashable, waiter: _Waiter) -> None:
        self._owners.setdefault(owner, deque()).append(waiter)
        self.length += 1

    def pop(self) -> _Waiter:
        """Remove and return the oldest piece of the owner whose turn it is."""
        owner = next(iter(self._owners))
        pieces = self._owners.pop(owner)
        waiter = pieces.popleft()
        if pieces:
            # behind all others
            self._owners[owner] = pieces
        self.length -= 1
        return waiter
