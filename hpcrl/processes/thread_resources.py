"""Resources that a thread makes for a caller that may stop waiting.

A call in a thread cannot be cancelled. `asyncio.to_thread` drops its result where the caller is: an open file, a
directory or a process then has no owner, and stays until the process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


async def acquire_in_thread(
    give_back: Callable[[T], Any], make: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call ``make`` in a thread, and return what it makes.

    Where this is cancelled meanwhile, ``give_back`` is called with it as soon as it is made, also in a thread.

    Raises
    ------
    Exception
        What ``make`` raises.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make, *args, **kwargs))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(lambda made: _return_result(give_back, made))
        raise


def _return_result(give_back: Callable[[T], Any], made: asyncio.Future[T]) -> None:
    # the exception is asked for in any case: asyncio logs one that was not
    if not made.cancelled() and made.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, give_back, made.result())
