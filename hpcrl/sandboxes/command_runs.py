"""Commands that run to their end in a thread, with bounds on their time and their output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.sandboxes.program_output import ProgramOutput

_THREADS = DaemonExecutor(64, thread_name_prefix="sandbox-command")
_READ_BYTES = 256 << 10


class CommandRun(NamedTuple):
    """Outcome of a command."""

    rc: int
    output: ProgramOutput
    killed_by: Literal["timeout", "output"] | None
    wall_s: float


async def run_command(
    argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, max_output: int, output_limit: int
) -> CommandRun:
    """Run a command, and return its outcome; one that is cancelled is killed (OSError where it cannot be started).

    Parameters
    ----------
    max_output:
        Bytes of output that are kept.
    output_limit:
        Bytes of output after which it is killed.
    """
    command = _Command(argv, stdin, timeout_s, max_output, output_limit)
    try:
        return await asyncio.get_running_loop().run_in_executor(_THREADS, command.run)
    except asyncio.CancelledError:
        command.kill()
        raise


class _Command:
    def __init__(self, argv: Sequence[str], stdin: bytes, timeout_s: float, max_output: int, output_limit: int) -> None:
        self._argv, self._stdin, self._timeout_s = argv, stdin, timeout_s
        self._output, self._limit = ProgramOutput(max_output), output_limit
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False

    def run(self) -> CommandRun:
        began = time.monotonic()
        given = os.memfd_create("given", os.MFD_CLOEXEC)
        try:
            with open(given, "wb", closefd=False) as stream:
                stream.write(self._stdin)
            os.lseek(given, 0, os.SEEK_SET)
            with self._lock:
                if self._given_up:
                    raise OSError("the call was cancelled")
                self._process = process = subprocess.Popen(
                    self._argv, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
                )
        finally:
            os.close(given)
        with process:
            try:
                killed_by = self._read(process, began + self._timeout_s)
            finally:
                self.kill()
        return CommandRun(process.returncode, self._output, killed_by, time.monotonic() - began)

    def _read(self, process: subprocess.Popen[bytes], deadline: float) -> Literal["timeout", "output"] | None:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if selector.select(left):
                    data = os.read(process.stdout.fileno(), _READ_BYTES)
                    if not data:
                        process.wait(max(0.1, deadline - time.monotonic()))
                        return None
                    self._output.add(data)
                    if self._output.total > self._limit:
                        return "output"
        return "timeout"

    def kill(self) -> None:
        with self._lock:
            self._given_up = True
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
