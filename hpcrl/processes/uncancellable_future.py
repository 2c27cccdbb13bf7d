"""Futures of a thread for readers that may stop waiting.

The reader of a `concurrent.futures.Future` can cancel it until it is marked as running, also through
`asyncio.wrap_future`: the thread that then sets its result fails.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def promise() -> Future[T]:
    """Return a future that its reader cannot cancel: the work is done anyway, the thread only reports its result."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future
