"""A thread that hangs in a read keeps no process alive."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from patience import patience, wait_for

import hpcrl
from hpcrl.processes.daemon_threads import DaemonExecutor

PACKAGE = Path(hpcrl.__file__).parent

PROGRAM = """
import asyncio, signal, sys
from hpcrl.processes.daemon_threads import run_process

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    hanging = asyncio.create_task(asyncio.to_thread(open, sys.argv[1]))
    print("reads", flush=True)
    await stop.wait()

run_process(main())
"""


def test_a_process_ends_while_a_read_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")  # to open it waits until somebody writes
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reads\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(5 * patience()) == 0
        finally:
            process.kill()


def test_results_errors_and_cancelled_calls() -> None:
    executor, gate = DaemonExecutor(1), threading.Event()
    first, failing, unwanted = executor.submit(gate.wait, 60), executor.submit(int, "x"), executor.submit(int, "7")
    assert unwanted.cancel()
    gate.set()
    assert first.result(60) is True
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(60)
    with pytest.raises(CancelledError):
        unwanted.result(60)
    assert list(executor.map(str, range(3))) == ["0", "1", "2"]


def test_threads_are_bounded_and_used_again() -> None:
    executor, gate, seen = DaemonExecutor(3, "bounded"), threading.Event(), set()

    def work() -> None:
        seen.add(threading.current_thread().name)
        gate.wait(60)

    futures = [executor.submit(work) for _ in range(8)]
    wait_for(lambda: len(seen) == 3, 10, "three threads at work")
    assert not any(future.done() for future in futures)
    gate.set()
    for future in futures:
        future.result(60)
    assert len(seen) == 3


def test_after_the_end_nothing_is_taken_and_threads_go() -> None:
    executor, gate = DaemonExecutor(1, "ending"), threading.Event()
    running, waiting = executor.submit(gate.wait, 60), executor.submit(int, "7")
    executor.shutdown(wait=False, cancel_futures=True)  # returns, although one runs
    assert waiting.cancelled()
    with pytest.raises(RuntimeError):
        executor.submit(int, "7")
    gate.set()
    assert running.result(60) is True
    wait_for(lambda: not any(t.name.startswith("ending") for t in threading.enumerate()), 10, "the thread has ended")


def test_every_process_with_an_event_loop_uses_it() -> None:
    """``asyncio.run`` waits at its end for every call of ``asyncio.to_thread``."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.run"
    ]
    assert not wrong
