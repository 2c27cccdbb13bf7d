"""The process that has verifiers: its start, requests to it, and its end.

The worker knows neither hpcrl nor the run. What it says is checked here; each wait for it has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.rollouts.environments.verifiers.guard import WORKER_PATH

_log = logging.getLogger(__name__)

_HEADER_BYTES = 4
_MAX_MESSAGE_BYTES = 1 << 28
_PINGS = 4
"""Number of liveness checks within the time in which the worker must answer."""
_CANCEL_S = 60.0
"""Maximum time for a rollout to end that is not needed any more."""
_END_S = 20.0
"""Maximum time for the guard to end the worker and what it has started."""
_STACKS_S = 0.5
_PROGRAM = Path(__file__).parent / "foreign" / "verifiers_worker.py"


class WorkerAnsweredError(Exception):
    """Raised where the worker answers that something failed.

    Attributes
    ----------
    kind, frames:
        Type of the exception, and its innermost frames, one a line.
    key, hint:
        Setting of the environment that is wrong, and a hint; empty where none is.
    """

    def __init__(self, error: _Error) -> None:
        super().__init__(f"{error.kind}: {error.message}")
        self.kind, self.what, self.frames = error.kind, error.message, error.frames
        self.key, self.hint = error.key, error.hint


class WorkerLostError(Exception):
    """Raised where the worker has ended, or hung and was ended."""


class _Error(msgspec.Struct, frozen=True):
    kind: str
    message: str
    frames: str = ""
    key: str = ""
    hint: str = ""


class _Answered(msgspec.Struct, frozen=True):
    """A message of the worker."""

    id: int = 0
    ok: dict[str, Any] | None = None
    error: _Error | None = None

    @property
    def value(self) -> dict[str, Any]:
        """Return what was asked for.

        Raises
        ------
        WorkerAnsweredError
            It failed.
        """
        if self.error is not None:
            raise WorkerAnsweredError(self.error)
        return self.ok or {}


def _decoded(data: bytes) -> _Answered:
    """Return a message of the worker (ValueError where it is none)."""
    try:
        # Python's parser reads NaN, which is refused later under its name
        return msgspec.convert(json.loads(data), _Answered)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class WorkerProcess:
    """A worker, under a guard that ends it with this process."""

    def __init__(self, python: str, environ: Mapping[str, str], *, answer_timeout_s: float) -> None:
        """Start it.

        Parameters
        ----------
        python:
            Interpreter that has verifiers.
        environ:
            Its variables; ``HOME`` and ``TMPDIR`` are a directory of its own where they are not among them.
        answer_timeout_s:
            Maximum time for a task, and for which its event loop may be blocked.

        Raises
        ------
        OSError
            It cannot be started.
        """
        self._answer_timeout_s = answer_timeout_s
        self._directory = tempfile.mkdtemp(prefix="hpcrl-verifiers-")
        own = {"HOME": self._directory, "TMPDIR": self._directory}
        self._runs, runs = socket.socketpair()
        self._tasks, tasks = socket.socketpair()
        life, self._life = os.pipe()
        kept = (runs.fileno(), tasks.fileno())
        worker = [python, "-P", "-u", str(_PROGRAM), *map(str, kept)]
        guarded = [str(life), ",".join(map(str, kept)), self._directory, *worker]
        try:
            self._guard = subprocess.Popen(
                module_command(sys.executable, "hpcrl.rollouts.environments.verifiers.guard", *guarded),
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=self._environ({**own, **environ}),
                pass_fds=(life, *kept),
                # a signal to this process's group must not keep the guard from ending the worker
                start_new_session=True,
            )
        finally:
            os.close(life)
            runs.close()
            tasks.close()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[_Answered]] = {}
        self._cancelled: dict[int, float] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._opening: asyncio.Lock | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self.lost = ""

    @staticmethod
    def _environ(environ: dict[str, str]) -> dict[str, str]:
        # the guard imports hpcrl as this process does; in the worker these packages would hide its own
        path = {WORKER_PATH: environ.pop("PYTHONPATH")} if "PYTHONPATH" in environ else {}
        own = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return with_safe_path({**environ, **path, **own})

    # -- one request after the other

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Ask for a build or a task, and wait; blocks.

        Raises
        ------
        WorkerAnsweredError
            The worker answers that it failed.
        WorkerLostError
            It did not answer.
        """
        self.check()
        deadline = time.monotonic() + timeout_s
        data = json.dumps(request).encode()
        try:
            self._tasks.settimeout(timeout_s)
            self._tasks.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)
            length = int.from_bytes(self._read(_HEADER_BYTES, deadline), "big")
            if length > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            answered = _decoded(self._read(length, deadline))
        except TimeoutError:
            self._lose(f"it gave no answer within {timeout_s:g} s")
        except (OSError, EOFError):
            self._lose("")
        except (ValueError, msgspec.ValidationError) as error:
            self._lose(f"it sent an invalid message: {error}")
        self.check()
        return answered.value

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._tasks.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._tasks.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError("closed the connection")
            data += piece
        return bytes(data)

    # -- many at once

    async def run(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Ask for a rollout, and wait for its end; cancelling this cancels it there.

        Raises
        ------
        WorkerAnsweredError
            It failed.
        WorkerLostError
            The worker ended meanwhile, or hung.
        TimeoutError
            It took too long.
        """
        await self._open()
        number = next(self._numbers)
        answer: asyncio.Future[_Answered] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send({"id": number, "do": "run", **request})
            async with asyncio.timeout(timeout_s):
                answered = await answer
            self.check()
            return answered.value
        finally:
            if not answer.done() or answer.cancelled():
                self._cancelled[number] = time.monotonic() + _CANCEL_S
                self._write({"id": number, "do": "cancel"})
            self._waiting.pop(number, None)

    async def _open(self) -> None:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            self.check()
            if self._writer is not None:
                return
            reader, self._writer = await asyncio.open_connection(sock=self._runs, limit=1 << 20)
            ready = self._waiting[0] = asyncio.get_running_loop().create_future()
            self._watchers.append(asyncio.create_task(self._receive(reader)))
            self._watchers.append(asyncio.create_task(self._watch(ready)))
        await self._wait_ready(ready)

    async def _wait_ready(self, ready: asyncio.Future[_Answered]) -> None:
        """Wait until shared tool servers run."""
        await asyncio.wait([ready], timeout=self._answer_timeout_s)
        if not ready.done():
            self._lose(f"its tool servers were not ready within {self._answer_timeout_s:g} s")
        self.check()

    async def _send(self, message: dict[str, Any]) -> None:
        self._write(message)
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    def _write(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            data = json.dumps(message).encode()
            self._writer.write(len(data).to_bytes(_HEADER_BYTES, "big") + data)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        why = ""
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(_HEADER_BYTES), "big")
                if length > _MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {length} bytes")
                answered = _decoded(await reader.readexactly(length))
                self._cancelled.pop(answered.id, None)
                if (waiting := self._waiting.get(answered.id)) is not None and not waiting.done():
                    waiting.set_result(answered)
        except (OSError, EOFError):
            pass
        except (ValueError, msgspec.ValidationError) as error:
            why = f"it sent an invalid message: {error}"
        self._lose(why)

    async def _watch(self, ready: asyncio.Future[_Answered]) -> None:
        """End a worker whose event loop does not run, or that does not end what was cancelled."""
        # the rollout that began it may have ended
        with contextlib.suppress(WorkerLostError):
            await self._wait_ready(ready)
        while not self.lost:
            await asyncio.sleep(self._answer_timeout_s / _PINGS)
            number = next(self._numbers)
            pong = self._waiting[number] = asyncio.get_running_loop().create_future()
            self._write({"id": number, "do": "ping"})  # not awaited: a blocked worker reads nothing
            await asyncio.wait([pong], timeout=self._answer_timeout_s)
            del self._waiting[number]
            if not pong.done():
                self.dump_stacks()
                await asyncio.sleep(_STACKS_S)
                self._lose(f"its event loop was blocked for {self._answer_timeout_s:g} s (its stacks are in the log)")
            if any(deadline < time.monotonic() for deadline in self._cancelled.values()):
                self._lose(f"a rollout of it did not end within {_CANCEL_S:g} s after it was cancelled")

    # -- its end

    def check(self) -> None:
        """Do nothing while it lives (WorkerLostError)."""
        if self.lost:
            raise WorkerLostError(f"the process of verifiers is lost: {self.lost}")

    def _lose(self, why: str) -> None:
        """End it, and fail all that wait."""
        if self.lost:
            return
        self.lost = why or self._exit_description()
        _log.warning("the process of verifiers is lost with %d rollouts: %s", len(self._waiting), self.lost)
        self.close()
        lost = _Answered(error=_Error("WorkerLostError", self.lost))
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(lost)

    def _exit_description(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._guard.wait(_END_S)
            # a guard returns its program's code in a byte
            ended_by = 256 - code if code > 128 else 0
            if ended_by in set(signal.Signals):
                return f"it was killed by {signal.Signals(ended_by).name}"
            return f"it ended with exit code {code}"
        return "it closed the connection"

    def dump_stacks(self) -> None:
        """Let the worker write the stacks of its threads into the log."""
        children = Path(f"/proc/{self._guard.pid}/task/{self._guard.pid}/children")
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(children.read_text().split()[0]), signal.SIGUSR1)

    def close(self) -> None:
        """End it with all that it has started; without effect where it has ended."""
        self.lost = self.lost or "it was closed"
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        try:
            self._guard.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        for task in self._watchers:
            task.cancel()
        self._tasks.close()
        if self._writer is not None:
            self._writer.close()
        else:
            self._runs.close()
        shutil.rmtree(self._directory, ignore_errors=True)
