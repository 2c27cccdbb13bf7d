"""Requests that run: one that an SDK repeats is joined, and a client that hangs up ends what only it waits for.

SDKs mark what they repeat (``x-stainless-retry-count``). A repetition without a mark is a new request: a program that
shortens its history may send the same messages again, and wants another answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Call(Generic[_T]):
    task: asyncio.Task[_T]
    waiting: int = 0


class RunningCalls(Generic[_T]):
    """The requests of one rollout.

    Attributes
    ----------
    joined:
        Repetitions that got the answer of another request.
    """

    def __init__(self, on_join: Callable[[], None]) -> None:
        """Begin without any; ``on_join`` is called for each that joins another one."""
        self._calls: dict[bytes, _Call[_T]] = {}
        self._running: set[asyncio.Task[_T]] = set()
        self._on_join = on_join
        self.joined = 0

    def __len__(self) -> int:
        return len(self._running)

    async def answer(self, key: bytes, work: Callable[[], Coroutine[object, object, _T]], *, repeats: bool) -> _T:
        """Return the result of ``work``; cancelling this ends it where no other call waits for it.

        Parameters
        ----------
        key:
            Key of the request.
        repeats:
            It is a repetition. It gets the answer of the request that it repeats, if that runs, or was the last to end
            before any other began: then its answer may have been lost on the way.
        """
        call = self._calls.get(key) if repeats else None
        if call is None:
            # the program has received calls that have ended, because it sends a new request
            self._calls = {other: each for other, each in self._calls.items() if not each.task.done()}
            call = self._calls[key] = _Call(asyncio.create_task(work()))
            self._running.add(call.task)
            call.task.add_done_callback(self._ended)
        else:
            self.joined += 1
            self._on_join()
        call.waiting += 1
        try:
            return await asyncio.shield(call.task)
        except BaseException:
            # an error is not given again; and a repetition of a request that was given up is a new request
            if (call.task.done() or call.waiting == 1) and self._calls.get(key) is call:
                del self._calls[key]
            raise
        finally:
            call.waiting -= 1
            if not call.waiting:
                call.task.cancel()

    def _ended(self, task: asyncio.Task[_T]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # who asked may have gone

    async def close(self) -> None:
        """End all of them."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._calls.clear()
