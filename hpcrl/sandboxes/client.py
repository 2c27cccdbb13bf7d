"""Clients of the daemon of sandboxes, and the daemon's process as its owner has it.

::

    async with local_sandboxes() as host:
        tree = await host.add_tree(Path("repository"))
        sandbox = await host.start(tree=tree)
        result = await sandbox.exec(["python3", "-m", "pytest", "-q"], timeout_s=60)
        patch = await sandbox.diff(tree)
        await sandbox.kill()
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcrl.processes.interpreter import module_command
from hpcrl.processes.thread_resources import acquire_in_thread
from hpcrl.sandboxes.daemon import READY_LINE, SECRET_FILE, SOCKET_FILE
from hpcrl.sandboxes.interface import (
    DEFAULT_MAX_DIFF_BYTES,
    DEFAULT_MAX_GET_BYTES,
    DEFAULT_MAX_OUTPUT_BYTES,
    DEFAULT_WORK_DIRECTORY,
    ExecResult,
    Patch,
    SandboxFile,
    SandboxLimits,
    SandboxLostError,
    SandboxStartError,
)
from hpcrl.sandboxes.messages import (
    ANSWERS,
    FORMAT_VERSION,
    AddTreeCall,
    AnyCall,
    ApplyCall,
    CallAnswer,
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
    WirePatch,
    encode,
    error_of,
    files_to_wire,
    patch_from_wire,
    patch_to_wire,
    read_message,
)

_START_S = 120.0
_STOP_S = 40.0
_MAX_SOCKET_PATH = 100
T = TypeVar("T")


class SandboxDaemon:
    """The daemon's process. It ends with this object's process, however that ends.

    Attributes
    ----------
    directory:
        Private directory with the socket and the secret.
    """

    def __init__(
        self,
        *,
        scratch: Path | None = None,
        cgroup: Path | None = None,
        backend: str = "bubblewrap",
        python: str = sys.executable,
        user: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the daemon and wait until it takes clients; this blocks.

        Parameters
        ----------
        scratch:
            Directory in which trees are kept; the temporary directory by default.
        cgroup:
            Delegated control group (version 2) for sandboxes alone.
        backend:
            ``bubblewrap``, ``docker``, ``podman`` or ``apptainer``.
        python:
            Interpreter of the daemon.
        user:
            As root: id of an ordinary user that the daemon becomes.
        variables:
            More variables of its environment.

        Raises
        ------
        SandboxStartError
            It does not start; the message says why.
        """
        parent = scratch or Path(tempfile.gettempdir())
        self.directory = Path(tempfile.mkdtemp(prefix="hpcrl-sandboxes-", dir=parent))
        if len(os.fsencode(self.directory / SOCKET_FILE)) > _MAX_SOCKET_PATH:
            self.directory.rmdir()
            raise SandboxStartError(f"{parent}: the path is too long for a socket\n    hint: name a shorter directory")
        descriptor = os.open(self.directory / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as stream:
            stream.write(secrets.token_hex(32))
        if user is not None:
            for path in (self.directory, self.directory / SECRET_FILE):
                os.chown(path, user, user)
        lifeline, self._lifeline = os.pipe()
        options = ["--directory", str(self.directory), "--lifeline", str(lifeline), "--backend", backend]
        options += [] if cgroup is None else ["--cgroup", str(cgroup)]
        try:
            self._process = subprocess.Popen(
                module_command(python, "hpcrl.sandboxes.daemon", *options),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=(lifeline,),
                env={**os.environ, **(variables or {})},
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        finally:
            os.close(lifeline)
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Pid of the daemon."""
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Return whether it has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the daemon with all sandboxes, and remove its directory; this blocks."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _wait_ready(self) -> None:
        assert self._process.stdout is not None
        said, deadline, fd = b"", time.monotonic() + _START_S, self._process.stdout.fileno()
        while b"\n" not in said or not said.startswith(READY_LINE.encode()):
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SandboxStartError(f"the daemon of sandboxes is not ready within {_START_S:g} s")
            data = os.read(fd, 1 << 16)
            if not data:
                text = said.decode("utf-8", "replace").strip().removeprefix("error ")
                raise SandboxStartError(text or "the daemon of sandboxes ends at its start; its log says why")
            said += data


class SandboxClient:
    """See `hpcrl.sandboxes.interface.SandboxHost`: sandboxes of a daemon. They end when the connection does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `connect`."""
        self._reader, self._writer = reader, writer
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[CallAnswer]] = {}
        self._lost = ""
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, directory: Path) -> SandboxClient:
        """Connect to the daemon of a directory.

        Raises
        ------
        SandboxLostError
            There is none, or it refuses.
        """
        try:
            secret = (directory / SECRET_FILE).read_text(encoding="ascii").strip()
            reader, writer = await asyncio.open_unix_connection(directory / SOCKET_FILE)
        except OSError as error:
            raise SandboxLostError(f"no daemon of sandboxes at {directory}: {error.strerror or error}") from None
        client = cls(reader, writer)
        try:
            await client.call(HelloCall(secret, FORMAT_VERSION), None)
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Give up the connection; the daemon ends the sandboxes."""
        self._task.cancel()
        self._fail("the client was closed")
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def add_tree(self, source: Path | Mapping[str, bytes | SandboxFile]) -> str:
        """See `SandboxHost.add_tree`."""
        if isinstance(source, Path):
            return await self.call(AddTreeCall(os.fsencode(source.absolute()), {}), str)
        return await self.call(AddTreeCall(b"", files_to_wire(source)), str)

    async def drop_tree(self, tree: str) -> None:
        """See `SandboxHost.drop_tree`."""
        await self.call(DropTreeCall(tree), None)

    async def describe(self) -> dict[str, str]:
        """See `SandboxHost.describe`."""
        found = await self.call(DescribeCall(), dict[bytes, str])
        return {os.fsdecode(name): value for name, value in found.items()}

    async def start(
        self,
        *,
        image: str | None = None,
        tree: str | None = None,
        limits: SandboxLimits | None = None,
        work_directory: str = DEFAULT_WORK_DIRECTORY,
        mounts: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RemoteSandbox:
        """See `SandboxHost.start`."""
        call = StartCall(image, tree, limits or SandboxLimits(), work_directory, dict(mounts or {}), _variables(env))
        return RemoteSandbox(self, await self.call(call, str))

    async def call(self, what: AnyCall, kind: type[T] | None) -> T:
        """Call the daemon. A call that is cancelled is given up there, too.

        Raises
        ------
        SandboxError
            The daemon reports an error; `SandboxLostError` where it has ended.
        """
        if self._lost:
            raise SandboxLostError(self._lost)
        number = next(self._numbers)
        answer: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._writer.write(encode(SandboxCall(number, what)))
        try:
            await self._writer.drain()
            found = await asyncio.shield(answer)
        except ConnectionError:
            raise SandboxLostError("the daemon of sandboxes has ended") from None
        except asyncio.CancelledError:
            self._give_up(number, what, answer)
            raise
        if found.kind:
            raise error_of(found)
        return msgspec.msgpack.decode(found.value, type=kind)

    def _give_up(self, number: int, what: AnyCall, answer: asyncio.Future[CallAnswer]) -> None:
        if self._lost:
            return
        self._writer.write(encode(SandboxCall(next(self._numbers), CancelCall(number))))

        def end_unwanted(done: asyncio.Future[CallAnswer]) -> None:
            # the sandbox or tree was made before the daemon read that the call was cancelled
            if not done.cancelled() and done.exception() is None and not done.result().kind and not self._lost:
                name = msgspec.msgpack.decode(done.result().value, type=str)
                end = KillCall(name) if isinstance(what, StartCall) else DropTreeCall(name)
                self._writer.write(encode(SandboxCall(next(self._numbers), end)))

        if isinstance(what, StartCall | AddTreeCall | SnapshotCall):
            answer.add_done_callback(end_unwanted)

    async def _read(self) -> None:
        try:
            while (data := await read_message(self._reader)) is not None:
                answer = ANSWERS.decode(data)
                if (waiting := self._waiting.pop(answer.number, None)) and not waiting.done():
                    waiting.set_result(answer)
        finally:
            self._fail("the daemon of sandboxes has ended, or refused the connection")

    def _fail(self, why: str) -> None:
        self._lost = self._lost or why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(SandboxLostError(self._lost))
                waiting.exception()
        self._waiting.clear()


class RemoteSandbox:
    """See `hpcrl.sandboxes.interface.Sandbox`: a sandbox of a daemon."""

    def __init__(self, client: SandboxClient, name: str) -> None:
        self._client, self._name = client, name

    @property
    def id(self) -> str:
        """See `Sandbox.id`."""
        return self._name

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output: int = DEFAULT_MAX_OUTPUT_BYTES,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        words = [os.fsencode(word) for word in argv]
        where = None if cwd is None else os.fsencode(cwd)
        call = ExecCall(self._name, words, stdin, timeout_s, max_output, where, _variables(env))
        return await self._client.call(call, ExecResult)

    async def put(self, files: Mapping[str, bytes | SandboxFile]) -> None:
        """See `Sandbox.put`."""
        await self._client.call(PutCall(self._name, files_to_wire(files)), None)

    async def get(self, paths: Sequence[str], *, max_bytes: int = DEFAULT_MAX_GET_BYTES) -> dict[str, bytes]:
        """See `Sandbox.get`."""
        call = GetCall(self._name, [os.fsencode(path) for path in paths], max_bytes)
        found = await self._client.call(call, dict[bytes, bytes])
        return {os.fsdecode(path): content for path, content in found.items()}

    async def diff(self, base: str, *, max_bytes: int = DEFAULT_MAX_DIFF_BYTES) -> Patch:
        """See `Sandbox.diff`."""
        return patch_from_wire(await self._client.call(DiffCall(self._name, base, max_bytes), WirePatch))

    async def apply(self, patch: Patch) -> None:
        """See `Sandbox.apply`."""
        await self._client.call(ApplyCall(self._name, patch_to_wire(patch)), None)

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        return await self._client.call(SnapshotCall(self._name), str)

    async def kill(self) -> None:
        """See `Sandbox.kill`."""
        with contextlib.suppress(SandboxLostError):
            await self._client.call(KillCall(self._name), None)


@contextlib.asynccontextmanager
async def local_sandboxes(
    *, scratch: Path | None = None, cgroup: Path | None = None, backend: str = "bubblewrap"
) -> AsyncIterator[SandboxClient]:
    """Start a daemon and yield a client of it; both end with the block. Arguments are those of `SandboxDaemon`.

    Raises
    ------
    SandboxStartError
        The node lacks what sandboxes need.
    """
    # in a thread: the daemon takes half a second to start. It does not depend on that thread's life
    daemon = await acquire_in_thread(SandboxDaemon.stop, SandboxDaemon, scratch=scratch, cgroup=cgroup, backend=backend)
    try:
        client = await SandboxClient.connect(daemon.directory)
        try:
            yield client
        finally:
            await client.close()
    finally:
        await asyncio.to_thread(daemon.stop)


def _variables(env: Mapping[str, str] | None) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in (env or {}).items()}
