"""The daemon's side of its spawner: requests with open files, answers, and ends of processes."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.sandboxes.cgroups import SandboxCgroup
from hpcrl.sandboxes.interface import SandboxLostError
from hpcrl.sandboxes.spawner import MAX_MESSAGE_BYTES

_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE")


@dataclass(slots=True)
class SandboxProcesses:
    """Processes and kernel objects of a running sandbox.

    Attributes
    ----------
    bubblewrap:
        Pid of bubblewrap, and a future of its exit code.
    pidfd:
        Pidfd of the first process in the sandbox.
    namespaces:
        Names of its own namespaces.
    uid:
        User id on the node; None for that of the daemon.
    cgroup:
        Its control groups, where there are such.
    seccomp:
        File with the filter.
    """

    bubblewrap: int
    ended: asyncio.Future[int]
    pidfd: int
    namespaces: list[str]
    uid: int | None
    cgroup: SandboxCgroup | None
    seccomp: int


class SpawnerLink:
    """Starts the spawner and talks with it. It must be made in the thread that lives as long as the process."""

    def __init__(self, lifeline: int, on_lost: Callable[[], None]) -> None:
        """Start the spawner.

        Parameters
        ----------
        lifeline:
            Reading end of a pipe that ends with the daemon's owner.
        on_lost:
            Called when the spawner has ended: all sandboxes have ended with it.
        """
        self._loop = asyncio.get_running_loop()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        variables = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        with theirs:
            arguments = (str(theirs.fileno()), str(lifeline))
            self._process = subprocess.Popen(
                module_command(sys.executable, "hpcrl.sandboxes.spawner", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**with_safe_path(variables), "PYTHONUTF8": "1"},
                pass_fds=(theirs.fileno(), lifeline),
            )
        self._on_lost = on_lost
        self._ids = count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._lost = False
        self._loop.add_reader(self._connection.fileno(), self._read)

    async def request(self, what: str, files: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """Ask the spawner; it gets copies of the open files.

        An answer about a new process has ``pid`` and ``ended``, a future of its exit code. A request that is cancelled
        is carried out all the same: a process that it started is killed.

        Raises
        ------
        OSError
            It could not be carried out; the message says why.
        SandboxLostError
            The spawner has ended.
        """
        answer = self._send(what, files, fields)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(self._kill_unwanted)
            raise

    def kill(self, pid: int, *, descendants: bool = False) -> None:
        """Kill a process that was started here, if it has not ended."""
        if not self._lost:
            answer = self._send("kill", (), {"pid": pid, "descendants": descendants})
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """End the spawner, and with it all that it has started."""
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        self._fail()
        try:
            async with asyncio.timeout(10):
                while self._process.poll() is None:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self._process.kill()
            self._process.wait()

    def _send(self, what: str, files: Sequence[int], fields: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        if self._lost:
            raise SandboxLostError("the process that starts sandboxes has ended")
        number = next(self._ids)
        message = json.dumps({"do": what, "id": number, **fields}).encode()
        copies = [os.dup(fd) for fd in files]
        if len(message) > MAX_MESSAGE_BYTES:
            copies.append(os.memfd_create("request"))
            with open(copies[-1], "wb", closefd=False) as stream:
                stream.write(message)
            message = json.dumps({"id": number, "in_file": True}).encode()
        self._answers[number] = answer = self._loop.create_future()
        self._unsent.append((message, copies))
        if len(self._unsent) == 1:
            self._flush()
        return answer

    def _flush(self) -> None:
        while self._unsent:
            message, files = self._unsent[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
            try:
                self._connection.sendmsg([message], rights)
            except BlockingIOError:
                self._loop.add_writer(self._connection.fileno(), self._flush)
                return
            except OSError:
                pass  # it has ended: the reader finds that out
            self._unsent.popleft()
            for fd in files:
                os.close(fd)
        self._loop.remove_writer(self._connection.fileno())

    def _read(self) -> None:
        while True:
            try:
                data = self._connection.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._connection.fileno())
                self._fail()
                self._on_lost()
                return
            self._take(json.loads(data))

    def _take(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            if ended := self._ends.pop(message["ended"], None):
                ended.set_result(message["rc"])
            return
        answer = self._answers.pop(message["re"])
        if "pid" in message:
            message["ended"] = self._ends[message["pid"]] = self._loop.create_future()
        if "error" in message:
            answer.set_exception(OSError(message["error"]))
        else:
            answer.set_result(message)

    def _kill_unwanted(self, answer: asyncio.Future[dict[str, Any]]) -> None:
        if not answer.cancelled() and answer.exception() is None and "pid" in answer.result():
            with contextlib.suppress(SandboxLostError):
                self.kill(answer.result()["pid"], descendants=True)

    def _fail(self) -> None:
        self._lost = True
        error = SandboxLostError("the process that starts sandboxes has ended")
        waiting: list[asyncio.Future[Any]] = [*self._answers.values(), *self._ends.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # it counts as seen: not every one is waited for
        self._answers.clear()
        self._ends.clear()
