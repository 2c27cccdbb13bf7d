"""Threads for file work that may hang, which the process can leave behind when it ends.

A read of a shared filesystem that hangs cannot be interrupted. Python waits at its end for every thread of a
`concurrent.futures.ThreadPoolExecutor`, and ``asyncio.run`` waits for the loop's default executor, which is where
``asyncio.to_thread`` runs. A process with such a thread ignores SIGTERM until it is killed. The threads of
`DaemonExecutor` are daemons that neither waits for, and `run_process` makes it the default of an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_WORKERS = 64
"""Maximum threads of an event loop's default executor. A thread that hangs is not replaced."""


class DaemonExecutor(ThreadPoolExecutor):
    """A thread pool whose threads do not keep the process alive.

    It derives from `ThreadPoolExecutor` because an event loop takes no other default executor; `submit` and `shutdown`
    are its own.
    """

    def __init__(self, max_workers: int = _MAX_WORKERS, thread_name_prefix: str = "background") -> None:
        """Prepare; threads are started as they are needed.

        Parameters
        ----------
        max_workers:
            Maximum threads at once.
        thread_name_prefix:
            Beginning of the threads' names.
        """
        super().__init__(max_workers, thread_name_prefix)
        self._limit, self._prefix = max_workers, thread_name_prefix
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._workers: list[threading.Thread] = []
        self._unfinished, self._ended = 0, False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `concurrent.futures.Executor.submit` (RuntimeError after `shutdown`)."""
        future: Future[T] = Future()
        with self._mutex:
            if self._ended:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._unfinished += 1
            self._tasks.put((future, lambda: fn(*args, **kwargs)))
            if len(self._workers) < min(self._limit, self._unfinished):
                name = f"{self._prefix}_{len(self._workers)}"
                self._workers.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._workers[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor.shutdown`. What may hang is called with ``wait=False``, or in a thread."""
        self._end(cancel_futures=cancel_futures)
        if wait:
            for thread in self._workers:
                thread.join()

    def _end(self, *, cancel_futures: bool) -> None:
        with self._mutex:
            self._ended = True
            while cancel_futures:
                try:
                    task = self._tasks.get_nowait()
                except queue.Empty:
                    break
                if task is not None:
                    task[0].cancel()
            for _ in self._workers:
                self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - it belongs to the reader of the future
                    future.set_exception(error)
                else:
                    future.set_result(result)
            with self._mutex:
                self._unfinished -= 1
            # drop references before the next wait: the call may hold large objects, and the wait may be long
            del task, future, call


class _LoopExecutor(DaemonExecutor):
    """The default executor of an event loop, whose end Python 3.11 waits for without a limit."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._end(cancel_futures=cancel_futures)


def run_process(main: Coroutine[Any, Any, T]) -> T:
    """Run the event loop of a process, as ``asyncio.run`` does; calls in threads that hang do not delay its end."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(_LoopExecutor())
        return runner.run(main)


async def run_bounded(function: Callable[[], object], *, limit_s: float) -> bool:
    """Run the last work of a process in a thread, and return whether it ended within ``limit_s`` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await asyncio.to_thread(function)
            return True
    return False
