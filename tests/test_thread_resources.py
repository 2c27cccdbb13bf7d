"""What a thread makes for a caller that stops waiting is given back."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import patience

from hpcrl.processes.thread_resources import acquire_in_thread


async def settle(condition: Callable[[], bool]) -> None:
    """Wait until a thread has done what is asked for."""
    async with asyncio.timeout(20 * patience()):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_result_and_the_error_are_those_of_the_call() -> None:
    given_back: list[int] = []
    assert await acquire_in_thread(given_back.append, int, "12", base=3) == 5
    with pytest.raises(ValueError, match="invalid literal"):
        await acquire_in_thread(given_back.append, int, "x")
    assert given_back == []


async def test_what_was_made_for_a_cancelled_caller_is_given_back(tmp_path: Path) -> None:
    begun, gate, closed = threading.Event(), threading.Event(), []

    def make() -> int:
        begun.set()
        assert gate.wait(60)
        return os.open(tmp_path, os.O_RDONLY)

    def close(fd: int) -> None:
        os.close(fd)
        closed.append(fd)

    task = asyncio.create_task(acquire_in_thread(close, make))
    await settle(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # at once: the thread is still at work
    assert closed == []
    gate.set()
    await settle(lambda: bool(closed))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(closed[0])


async def test_an_error_for_a_cancelled_caller_is_nobodys() -> None:
    begun, gate, given_back = threading.Event(), threading.Event(), []
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    def fail() -> int:
        begun.set()
        assert gate.wait(60)
        raise OSError("no space")

    task = asyncio.create_task(acquire_in_thread(given_back.append, fail))
    await settle(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    others = asyncio.all_tasks() - {asyncio.current_task()}
    gate.set()
    await asyncio.wait(others, timeout=20 * patience())
    del others, task
    await asyncio.sleep(0)
    assert given_back == complaints == []
