"""Serves sandboxes of one host to clients on a unix socket. What a connection started ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import struct
from collections import Counter
from pathlib import Path

import msgspec

from hpcrl.sandboxes.interface import Sandbox, SandboxError, SandboxHost, SandboxLostError
from hpcrl.sandboxes.messages import (
    CALLS,
    FORMAT_VERSION,
    AddTreeCall,
    AnyCall,
    ApplyCall,
    CallAnswer,
    CallValue,
    CancelCall,
    DescribeCall,
    DiffCall,
    DropTreeCall,
    ExecCall,
    GetCall,
    HelloCall,
    KillCall,
    PutCall,
    SandboxCall,
    SnapshotCall,
    StartCall,
    encode,
    file_from_wire,
    kind_of,
    patch_from_wire,
    read_message,
    value_of,
)

_HELLO_S = 10.0
_log = logging.getLogger(__name__)


class SandboxServer:
    """Answers calls of clients that know the secret."""

    def __init__(self, host: SandboxHost, secret: str) -> None:
        self._host, self._secret = host, secret
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Listen on a socket that its owner alone may open."""
        previous = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, path)
        finally:
            os.umask(previous)

    async def close(self) -> None:
        """Take no more clients and end the connections, with the sandboxes that they started."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = _Connection(self._host, writer)
        try:
            if await self._admit(reader, writer):
                while (data := await read_message(reader)) is not None:
                    connection.take(CALLS.decode(data))
        except (msgspec.DecodeError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            await asyncio.shield(connection.close())

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether a client runs as the daemon's user or as root, and sends the secret."""
        peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        try:
            async with asyncio.timeout(_HELLO_S):
                data = await read_message(reader)
            call = None if data is None else CALLS.decode(data)
        except (TimeoutError, msgspec.DecodeError):
            return False
        if (
            call is None
            or not isinstance(call.what, HelloCall)
            or struct.unpack("3i", peer)[1] not in (0, os.geteuid())
        ):
            return False
        if not hmac.compare_digest(call.what.secret.encode(), self._secret.encode()):
            _log.warning("a client with a wrong secret was refused")
            return False
        if call.what.format_version != FORMAT_VERSION:
            error = f"the daemon of sandboxes speaks format {FORMAT_VERSION}, the client {call.what.format_version}"
            writer.write(encode(CallAnswer(call.number, kind="error", message=error)))
            return False
        writer.write(encode(CallAnswer(call.number)))
        return True


class _Connection:
    """Calls of one client, and what it holds."""

    def __init__(self, host: SandboxHost, writer: asyncio.StreamWriter) -> None:
        self._host, self._writer = host, writer
        self._sandboxes: dict[str, Sandbox] = {}
        self._trees: Counter[str] = Counter()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._closed = False

    def take(self, call: SandboxCall) -> None:
        """Begin to answer a call."""
        if isinstance(call.what, CancelCall):
            if task := self._calls.get(call.what.number):
                task.cancel()
            return
        task = asyncio.create_task(self._answer(call))
        self._calls[call.number] = task
        task.add_done_callback(lambda _: self._calls.pop(call.number, None))

    async def close(self) -> None:
        """Give up all calls, and end what the client started."""
        self._closed = True
        for task in list(self._calls.values()):
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        await asyncio.gather(*(each.kill() for each in self._sandboxes.values()), return_exceptions=True)
        for tree in self._trees.elements():
            await self._host.drop_tree(tree)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _answer(self, call: SandboxCall) -> None:
        try:
            answer = CallAnswer(call.number, value_of(await self._carry_out(call.what)))
        except SandboxError as error:
            answer = CallAnswer(call.number, kind=kind_of(error), message=str(error))
        except asyncio.CancelledError:
            answer = CallAnswer(call.number, kind="error", message="the call was cancelled")
        except Exception as error:  # noqa: BLE001 - a defect costs one call, and not the sandboxes of all clients
            _log.exception("a call of a client failed")
            answer = CallAnswer(call.number, kind="error", message=f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            self._writer.write(encode(answer))
            await self._writer.drain()

    async def _carry_out(self, call: AnyCall) -> CallValue:
        match call:
            case StartCall():
                return await self._start(call)
            case DescribeCall():
                return await self._host.describe()
            case AddTreeCall():
                files = {os.fsdecode(path): file_from_wire(file) for path, file in call.files.items()}
                source = Path(os.fsdecode(call.directory)) if call.directory else files
                return self._keep_tree(await self._host.add_tree(source))
            case DropTreeCall():
                if self._trees[call.tree] > 0:
                    self._trees[call.tree] -= 1
                    await self._host.drop_tree(call.tree)
                return None
            case KillCall():
                if sandbox := self._sandboxes.get(call.sandbox):
                    await sandbox.kill()
                    self._sandboxes.pop(call.sandbox, None)
                return None
            case HelloCall() | CancelCall():
                raise SandboxError("this call has no answer here")
        found = await _work_in(self._sandbox(call.sandbox), call)
        return self._keep_tree(str(found)) if isinstance(call, SnapshotCall) else found

    async def _start(self, call: StartCall) -> str:
        sandbox = await self._host.start(
            image=call.image,
            tree=call.tree,
            limits=call.limits,
            work_directory=call.work_directory,
            mounts=call.mounts,
            env=_text(call.env),
        )
        self._sandboxes[sandbox.id] = sandbox
        return sandbox.id

    def _keep_tree(self, tree: str) -> str:
        self._trees[tree] += 1
        return tree

    def _sandbox(self, name: str) -> Sandbox:
        try:
            return self._sandboxes[name]
        except KeyError:
            raise SandboxLostError(f"there is no sandbox {name[:100]!r} of this client") from None


async def _work_in(
    sandbox: Sandbox, call: ExecCall | PutCall | GetCall | DiffCall | ApplyCall | SnapshotCall
) -> CallValue:
    match call:
        case ExecCall():
            return await sandbox.exec(
                [os.fsdecode(word) for word in call.argv],
                stdin=call.stdin,
                timeout_s=call.timeout_s,
                max_output=call.max_output,
                cwd=None if call.cwd is None else os.fsdecode(call.cwd),
                env=_text(call.env),
            )
        case GetCall():
            return await sandbox.get([os.fsdecode(path) for path in call.paths], max_bytes=call.max_bytes)
        case DiffCall():
            return await sandbox.diff(call.base, max_bytes=call.max_bytes)
        case SnapshotCall():
            return await sandbox.snapshot()
        case PutCall():
            await sandbox.put({os.fsdecode(path): file_from_wire(file) for path, file in call.files.items()})
        case ApplyCall():
            await sandbox.apply(patch_from_wire(call.patch))
    return None


def _text(variables: dict[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
