"""A signal reaches a process whose event loop turns, and ends one whose event loop hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patience

PROGRAM = """
import asyncio, signal, sys
from hpcrl.processes import signals
from hpcrl.processes.daemon_threads import run_process

signals._STUCK_S = float(sys.argv[2])

def say(what):
    print(what, flush=True)

async def main():
    stop = asyncio.Event()
    signals.handle_signals({signal.SIGTERM: lambda: say("wrong")})  # of an attempt before this one
    signals.handle_signals({signal.SIGTERM: stop.set, signal.SIGUSR2: lambda: say("warned")})
    say("ready")
    if sys.argv[1]:
        await asyncio.sleep(0)
        open(sys.argv[1])
    await stop.wait()
    say("stopped")

run_process(main())
"""


def start(file: str, stuck_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, file, str(stuck_s)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_handlers_are_called_in_the_loop() -> None:
    with start("", 60.0) as process:
        try:
            assert process.stdout is not None
            process.send_signal(signal.SIGUSR2)
            assert process.stdout.readline() == "warned\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "stopped\n"
            assert process.wait(10 * patience()) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_loop_that_hangs_does_not_keep_the_process(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "file")
    with start(str(tmp_path / "file"), 0.2) as process:
        try:
            process.send_signal(signal.SIGUSR2)  # ends nothing
            process.send_signal(number)
            assert process.wait(10 * patience()) == 128 + number
        finally:
            process.kill()
