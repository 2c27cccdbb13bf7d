"""What a thread does for others, who may stop waiting for it.

`concurrent.futures.Future` can be cancelled by its reader as long as nobody says that it runs, also by way of
`asyncio.wrap_future`: the thread that then sets its result fails.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

__all__ = ["promise"]

T = TypeVar("T")


def promise() -> Future[T]:
    """A future that its reader cannot cancel: what was asked for is done, and the thread only has to say so."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future
