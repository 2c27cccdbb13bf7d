"""Starts sandboxes with bubblewrap on this node, in the process that keeps them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

from hpcrl.processes.thread_resources import acquire_in_thread
from hpcrl.sandboxes.bubblewrap import ETC, BubblewrapCommand, bubblewrap_command, check_paths, find_bubblewrap
from hpcrl.sandboxes.bubblewrap_sandbox import BubblewrapSandbox
from hpcrl.sandboxes.cgroups import SandboxCgroup, find_cgroups
from hpcrl.sandboxes.identities import FIRST_UID, Identities
from hpcrl.sandboxes.init_program import READY, init_program
from hpcrl.sandboxes.interface import (
    DEFAULT_WORK_DIRECTORY,
    SandboxError,
    SandboxFile,
    SandboxLimits,
    SandboxLostError,
    SandboxStartError,
)
from hpcrl.sandboxes.joining import separate_namespaces
from hpcrl.sandboxes.node_memory import NodeMemory
from hpcrl.sandboxes.seccomp import seccomp_filter
from hpcrl.sandboxes.spawner_link import SandboxProcesses, SpawnerLink
from hpcrl.sandboxes.trees import TreeStore, records_of_files
from hpcrl.sandboxes.watcher import watch_groups, watch_memory

_START_S = 60.0
"""Maximum seconds of a start, on a node that is busy with others."""
_MAX_MESSAGE = 4096
_REMOVE_S = 10.0


class BubblewrapHost:
    """See `hpcrl.sandboxes.interface.SandboxHost`.

    Attributes
    ----------
    memory:
        Means that limit the memory of a sandbox, in words.
    """

    def __init__(
        self,
        directory: Path,
        lifeline: int,
        *,
        on_lost: Callable[[], None],
        delegated: Path | None = None,
        node_memory: NodeMemory | None = None,
    ) -> None:
        """Prepare; no sandbox is started. It must be called in the main thread, in a running event loop.

        Parameters
        ----------
        directory:
            Private directory for trees.
        lifeline:
            Reading end of a pipe that ends with the owner of this process.
        on_lost:
            Called when all sandboxes have ended because their spawner has.
        delegated:
            A control group (version 2) for sandboxes alone; by default one is looked for.
        node_memory:
            Limit of all sandboxes of the node together; None: only each one has a limit.

        Raises
        ------
        SandboxStartError
            The node lacks what sandboxes need; the message says what.
        """
        self._program = find_bubblewrap()
        self._identities = Identities()
        limit = None if node_memory is None else node_memory.limit
        self._node_memory = node_memory
        self._cgroups, how = find_cgroups(os.getpid(), delegated=delegated, memory_bytes=limit)
        self.memory = how if self._cgroups else f"watcher ({how})"
        machine = platform.machine()
        try:
            self._files = {
                "seccomp": seccomp_filter(machine, unmapped_memory=self._cgroups is not None),
                "init": init_program(machine),
            }
        except ValueError as error:
            raise SandboxStartError(str(error)) from None
        self._fds: dict[str, int] = {}
        self._trees = TreeStore(directory / "trees")
        self._sandboxes: dict[str, BubblewrapSandbox] = {}
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._link = SpawnerLink(lifeline, on_lost)
        self._watcher: asyncio.Task[None] | None = None
        if self._cgroups is None:
            self._watcher = asyncio.create_task(watch_memory(self._sandboxes, node_memory))
        elif node_memory is not None:
            self._watcher = asyncio.create_task(watch_groups(self._sandboxes, node_memory, self._cgroups))

    async def add_tree(self, source: Path | Mapping[str, bytes | SandboxFile]) -> str:
        """See `SandboxHost.add_tree`."""
        if isinstance(source, Path):
            return await acquire_in_thread(self._trees.drop, self._trees.add_directory, source)
        return await acquire_in_thread(self._trees.drop, self._trees.add, records_of_files(source))

    async def drop_tree(self, tree: str) -> None:
        """See `SandboxHost.drop_tree`."""
        self._trees.drop(tree)

    async def describe(self) -> dict[str, str]:
        """See `SandboxHost.describe`."""
        version = f"cgroup v{self._cgroups.version}, " if self._cgroups else ""
        uid = FIRST_UID if os.geteuid() == 0 else os.geteuid()
        found = {"memory": self.memory, "processes": f"{version}RLIMIT_NPROC of its user namespace", "uid": str(uid)}
        return found if self._node_memory is None else found | self._node_memory.describe(f"{version}watcher")

    async def start(
        self,
        *,
        image: str | None = None,
        tree: str | None = None,
        limits: SandboxLimits | None = None,
        work_directory: str = DEFAULT_WORK_DIRECTORY,
        mounts: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> BubblewrapSandbox:
        """See `SandboxHost.start`."""
        limits = limits or SandboxLimits()
        check_paths(work_directory, mounts or {})
        command = bubblewrap_command(
            self._program, limits=limits, work_directory=work_directory, image=image, mounts=mounts
        )
        name = f"sandbox-{os.getpid()}-{next(self._numbers)}"
        uid = self._identities.take()
        cgroup: SandboxCgroup | None = None
        try:
            cgroup = self._cgroups.make(name, limits) if self._cgroups else None
            async with asyncio.timeout(_START_S):
                processes = await self._start(command, uid, cgroup)
        except BaseException as error:
            self._release(name, uid, cgroup)
            if isinstance(error, TimeoutError):
                raise SandboxStartError(f"a sandbox does not start within {_START_S:g} s") from None
            if isinstance(error, OSError):
                raise SandboxStartError(f"a sandbox does not start: {error}") from None
            raise
        sandbox = BubblewrapSandbox(
            name,
            processes,
            self._link,
            self._trees,
            limits=limits,
            work_directory=work_directory,
            env=env or {},
            on_end=lambda: self._release(name, uid, cgroup),
            node_memory=self._node_memory,
        )
        self._sandboxes[name] = sandbox
        try:
            await self._fill(sandbox, tree)
        except BaseException:
            # a caller that gave up does not wait for the end
            self._later(sandbox)
            raise
        return sandbox

    async def close(self) -> None:
        """End all sandboxes."""
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.gather(*(each.kill() for each in list(self._sandboxes.values())), return_exceptions=True)
        await self._link.close()

    def release(self) -> None:
        """Give up what sandboxes used, after `close`."""
        if self._cgroups is not None:
            self._cgroups.remove()
        if self._node_memory is not None:
            self._node_memory.close()
        self._identities.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    async def _fill(self, sandbox: BubblewrapSandbox, tree: str | None) -> None:
        given: int | None = None
        if tree is not None:
            given = await acquire_in_thread(os.close, self._trees.open, tree)
        try:
            await sandbox.prepare(given)
        finally:
            if given is not None:
                os.close(given)

    async def _start(
        self, command: BubblewrapCommand, uid: int | None, cgroup: SandboxCgroup | None
    ) -> SandboxProcesses:
        """Start bubblewrap and wait until the sandbox is set up (OSError where it does not come to that)."""
        info, info_write = _pipe()
        ready, ready_write = _pipe()
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        contents = [self._reopened(name) for name in (*self._files, *command.contents)]
        process = None
        try:
            try:
                process = await self._link.request(
                    "start",
                    [null, ready_write, ready_write, info_write, *contents],
                    argv=list(command.argv),
                    numbers=[0, 1, 2, *command.numbers.values()],
                    env={},
                    uid=uid,
                    cgroups=cgroup.joins if cgroup else (),
                )
            finally:
                for fd in (null, ready_write, info_write, *contents):
                    os.close(fd)
            said = await _until(ready, READY)
            if not said.endswith(READY):
                text = said.decode("utf-8", "replace").strip()
                raise OSError(f"bubblewrap says: {text or 'nothing'}{_hint(text)}")
            pid = json.loads(await _until(info, b"}"))["child-pid"]
            pidfd = os.pidfd_open(pid)
            try:
                namespaces = separate_namespaces(pid)
                if process["ended"].done():
                    raise OSError("bubblewrap has ended")
            except BaseException:
                os.close(pidfd)
                raise
        except BaseException:
            if process is not None:
                with contextlib.suppress(SandboxLostError):
                    self._link.kill(process["pid"], descendants=True)
            raise
        finally:
            os.close(info)
            os.close(ready)
        # one description for all: each entering process reads it from the beginning
        return SandboxProcesses(process["pid"], process["ended"], pidfd, namespaces, uid, cgroup, self._fd("seccomp"))

    def _fd(self, name: str) -> int:
        """Return the file in memory with a given content."""
        if name not in self._fds:
            content = self._files.get(name) or ETC[name].encode()
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
            os.write(fd, content)
            self._fds[name] = fd
        return self._fds[name]

    def _reopened(self, name: str) -> int:
        """Return a file description of its own: bubblewrap reads it from its position on."""
        return os.open(f"/proc/self/fd/{self._fd(name)}", os.O_RDONLY | os.O_CLOEXEC)

    def _release(self, name: str, uid: int | None, cgroup: SandboxCgroup | None) -> None:
        self._sandboxes.pop(name, None)
        task = asyncio.create_task(self._remove(uid, cgroup))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remove(self, uid: int | None, cgroup: SandboxCgroup | None) -> None:
        """Give back what a sandbox used once the kernel lets its groups go, that is when its processes are gone."""
        deadline = asyncio.get_running_loop().time() + _REMOVE_S
        while cgroup is not None and not cgroup.remove():
            if asyncio.get_running_loop().time() > deadline:
                return  # its user id is not used again
            await asyncio.sleep(0.02)
        self._identities.give_back(uid)

    def _later(self, sandbox: BubblewrapSandbox) -> None:
        async def end() -> None:
            with contextlib.suppress(SandboxError):
                await sandbox.kill()

        task = asyncio.create_task(end())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reading, False)
    return reading, writing


async def _until(fd: int, mark: bytes) -> bytes:
    """Read a pipe until a mark or its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    said = bytearray()

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, _MAX_MESSAGE)
            said.extend(data)
            if (not data or said.endswith(mark) or mark in data or len(said) > _MAX_MESSAGE) and not done.done():
                done.set_result(None)

    loop.add_reader(fd, read)
    try:
        await done
    finally:
        loop.remove_reader(fd)
    return bytes(said)


def _hint(text: str) -> str:
    if "namespace" in text or "uid map" in text:
        return (
            "\n    hint: the node may not let users make namespaces; look at `sysctl user.max_user_namespaces "
            "kernel.unprivileged_userns_clone kernel.apparmor_restrict_unprivileged_userns`"
        )
    return ""
