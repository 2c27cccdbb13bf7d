"""Runs rollouts of verifiers, in the interpreter that has verifiers: ``python verifiers_worker.py RUNS TASKS``.

This file is run by its path, with the standard library and verifiers alone: the interpreter has no hpcrl. Two sockets
connect it with hpcrl: ``TASKS`` answers one request after the other (build, tasks), ``RUNS`` many at once (rollouts).
Messages are JSON documents, each preceded by its length in four bytes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

HEADER_BYTES = 4
_FIRST_V1 = (0, 4)
"""First version of verifiers whose tasksets are played."""
_END_S = 10.0
"""Maximum time in seconds for rollouts that are cancelled at the end."""
_MESSAGE = 4000
"""Maximum characters of an error's message, and of its frames."""


class SettingError(Exception):
    """A setting of the recipe is wrong: its key below the environment, the problem, and a hint."""

    def __init__(self, key: str, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.key, self.hint = key, hint


def frame(value: dict[str, Any]) -> bytes:
    """Return the encoded message, preceded by its length."""
    data = json.dumps(value).encode()
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def read_blocking(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None where the other side has gone."""
    header = _exactly(connection, HEADER_BYTES)
    data = _exactly(connection, int.from_bytes(header, "big")) if header else b""
    return json.loads(data) if data else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def described(error: BaseException) -> dict[str, str]:
    """Return the kind, the message and the frames of an exception, as JSON."""
    frames = [f"{each.filename}:{each.lineno} in {each.name}" for each in traceback.extract_tb(error.__traceback__)]
    try:
        message = str(error)
    except Exception as other:  # noqa: BLE001 - foreign code
        message = f"(its message cannot be shown: {type(other).__name__})"
    found = {
        "kind": type(error).__name__,
        "message": message[:_MESSAGE],
        "frames": "\n".join(frames[-8:])[:_MESSAGE],
    }
    if isinstance(key := getattr(error, "key", None), str):
        found |= {"key": key, "hint": str(getattr(error, "hint", ""))}
    return found


def sibling(name: str) -> ModuleType:
    """Import a file of this directory under a name that no package has."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"hpcrl_verifiers_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def make_backend(build: dict[str, Any]) -> Any:
    """Import verifiers and make the environment.

    Raises
    ------
    SettingError
        It cannot be made.
    """
    if importlib.util.find_spec("verifiers") is None:
        hint = "set python to an interpreter that has it"
        raise SettingError("python", f"{sys.executable} has no package verifiers", hint)
    packages, splits = sibling("packages"), sibling("splits")
    name, module = packages.importable(build)
    if module is not None and callable(getattr(module, "load_environment", None)):
        return sibling("classic").make(build, module, splits)
    if tuple(map(int, re.findall(r"\d+", _version())[:2])) < _FIRST_V1:
        what = f"{sys.executable} has verifiers {_version()}, and the package has no load_environment"
        raise SettingError("python", what, "install verifiers 0.4 or newer")
    return sibling("v1").make(build, name, splits)


def _version() -> str:
    from importlib.metadata import version  # noqa: PLC0415

    return version("verifiers")


class WorkerServer:
    """Answers requests for tasks in a thread, and for rollouts in the event loop."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._running: dict[int, asyncio.Task[None]] = {}

    def serve_tasks(self, connection: socket.socket) -> None:
        """Answer until the other side has gone."""
        while (asked := read_blocking(connection)) is not None:
            try:
                answer = frame({"ok": self._backend.task(asked["split"], asked["index"])})
            except Exception as error:  # noqa: BLE001 - foreign code: its errors are answers, and what JSON cannot hold
                answer = frame({"error": described(error)})
            connection.sendall(answer)

    async def serve_runs(self, connection: socket.socket) -> None:
        """Answer until the other side has gone."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
        async with self._backend.serving():
            writer.write(frame({"id": 0, "ok": {}}))
            try:
                while True:
                    header = await reader.readexactly(HEADER_BYTES)
                    asked = json.loads(await reader.readexactly(int.from_bytes(header, "big")))
                    self._take(asked, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                running = list(self._running.values())
                for task in running:
                    task.cancel()
                if running:
                    await asyncio.wait(running, timeout=_END_S)

    def _take(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = asked["id"]
        if asked["do"] == "ping":
            writer.write(frame({"id": number, "ok": {}}))
        elif asked["do"] == "cancel":
            if (task := self._running.get(number)) is not None:
                task.cancel()
        else:
            self._running[number] = asyncio.create_task(self._run(asked, writer))

    async def _run(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = asked["id"]
        try:
            answer = frame({"id": number, "ok": await self._backend.run(asked)})
        except BaseException as error:  # noqa: BLE001 - sys.exit() in foreign code ends one rollout, as cancelling does
            answer = frame({"id": number, "error": described(error)})
        finally:
            del self._running[number]
        writer.write(answer)


def main(runs_fd: int, tasks_fd: int) -> None:
    """Build what the first request describes, and serve it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    runs, tasks = (socket.socket(fileno=fd) for fd in (runs_fd, tasks_fd))
    for each in (runs, tasks):
        os.set_inheritable(each.fileno(), False)
    build = read_blocking(tasks)
    if build is None:
        return
    try:
        backend = make_backend(build)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: its errors are answers
        tasks.sendall(frame({"error": described(error)}))
        return
    tasks.sendall(frame({"ok": {"version": _version(), "notes": backend.notes}}))
    server = WorkerServer(backend)
    threading.Thread(target=server.serve_tasks, args=(tasks,), daemon=True).start()
    # asyncio.run would wait at its end for threads in which foreign code may hang: this process just ends
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(server.serve_runs(runs))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
