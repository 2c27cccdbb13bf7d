"""A sandbox that bubblewrap made: programs and file operations enter its namespaces from outside."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hpcrl.processes.thread_resources import acquire_in_thread
from hpcrl.sandboxes.archive import ABSENT, FILE, ArchiveError, ArchiveRecord
from hpcrl.sandboxes.bubblewrap import resource_limits, tmpfs_options
from hpcrl.sandboxes.cgroups import SandboxCgroup
from hpcrl.sandboxes.interface import (
    DEFAULT_MAX_DIFF_BYTES,
    DEFAULT_MAX_GET_BYTES,
    DEFAULT_MAX_OUTPUT_BYTES,
    MIB,
    ExecResult,
    KilledBy,
    Patch,
    PatchEntry,
    SandboxError,
    SandboxEvictedError,
    SandboxFile,
    SandboxLimitError,
    SandboxLimits,
    SandboxLostError,
)
from hpcrl.sandboxes.memory_files import archive_file, input_file, read_available, records_of_answer
from hpcrl.sandboxes.node_memory import NodeMemory
from hpcrl.sandboxes.program_output import ProgramOutput
from hpcrl.sandboxes.spawner_link import SandboxProcesses, SpawnerLink
from hpcrl.sandboxes.trees import TreeStore, file_of, records_of_files

_FILES_S = 120.0
"""Maximum seconds of a file operation."""
_KILL_S = 10.0
_END_S = 0.1
_PATHS_BYTES = 64 * MIB
"""Maximum bytes of paths and headers in an answer, besides contents."""
_DRAIN_BYTES = 4 * MIB
"""Maximum bytes that are read after a program has ended; processes in the background may still write."""
_log = logging.getLogger(__name__)
_VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp", "LANG": "C.UTF-8"}


class BubblewrapSandbox:
    """See `hpcrl.sandboxes.interface.Sandbox`."""

    def __init__(
        self,
        name: str,
        processes: SandboxProcesses,
        link: SpawnerLink,
        trees: TreeStore,
        *,
        limits: SandboxLimits,
        work_directory: str,
        env: Mapping[str, str],
        on_end: Callable[[], None],
        node_memory: NodeMemory | None = None,
    ) -> None:
        """Take over processes that run.

        Parameters
        ----------
        on_end:
            Called once, when all of its processes have ended.
        node_memory:
            Limit of all sandboxes of the node together, where there is one.
        """
        self._name, self._processes, self._link, self._trees = name, processes, link, trees
        self._limits, self._work, self._env = limits, work_directory, {**_VARIABLES, **env}
        self._on_end, self._node_memory = on_end, node_memory
        self._ended = False
        self._killed = False
        self._evicted_for = ""
        self._kernel_kills = 0
        self.memory_kills = 0
        """Number of times that the watcher has ended processes of it."""
        processes.ended.add_done_callback(lambda _: self._finish())

    @property
    def id(self) -> str:
        """See `Sandbox.id`."""
        return self._name

    @property
    def limits(self) -> SandboxLimits:
        """Its limits."""
        return self._limits

    @property
    def pidfd(self) -> int:
        """Return the pidfd of its first process; -1 after its end."""
        return -1 if self._ended else self._processes.pidfd

    @property
    def cgroup(self) -> SandboxCgroup | None:
        """Its control groups, where there are such."""
        return self._processes.cgroup

    @property
    def lives(self) -> bool:
        """Return whether nothing has begun to end it."""
        return not self._ended and not self._killed

    @property
    def work_directory(self) -> str:
        """Path of the work tree inside."""
        return self._work

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
        self._must_live()
        if not argv or any("\0" in word for word in argv):
            raise SandboxError("a program needs a name, and no argument may have a NUL")
        loop = asyncio.get_running_loop()
        kills, started = self._memory_kills(), loop.time()
        output = ProgramOutput(max_output)
        killed_by: KilledBy | None = None
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        try:
            try:
                with input_file(stdin) as given:
                    process = await self._request(
                        "exec",
                        [given, writing],
                        argv=list(argv),
                        cwd=os.path.join(self._work, cwd or ""),
                        env={**self._env, **(env or {})},
                        limits=resource_limits(self._limits),
                    )
            finally:
                os.close(writing)
            pid: int = process["pid"]
            ended: asyncio.Future[int] = process["ended"]
            over: asyncio.Future[None] = loop.create_future()

            def read() -> None:
                if not self._read(reading, output):
                    loop.remove_reader(reading)
                elif output.total > self._limits.output_bytes:
                    loop.remove_reader(reading)  # it waits for us from now on, until it is killed
                    over.set_result(None)

            loop.add_reader(reading, read)
            try:
                await asyncio.wait((ended, over), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    killed_by = "output" if over.done() else "timeout"
            finally:
                # a caller that gave up must leave nothing behind, either
                if not ended.done():
                    self._link.kill(pid, descendants=True)
            rc = await asyncio.shield(ended)
            while output.total < self._limits.output_bytes + _DRAIN_BYTES and self._read(reading, output, once=False):
                pass
        finally:
            loop.remove_reader(reading)
            os.close(reading)
        if rc == -signal.SIGKILL and killed_by is None and not self._killed:
            # where the whole sandbox was ended, its programs end some milliseconds before it
            await asyncio.wait((self._processes.ended,), timeout=_END_S)
        self._must_live()
        if killed_by is None:
            killed_by = self._cause(rc, kills)
        wall_s = loop.time() - started
        return ExecResult(rc, output.content(), output.truncated, killed_by, wall_s, output.total)

    async def put(self, files: Mapping[str, bytes | SandboxFile]) -> None:
        """See `Sandbox.put`."""
        await self._write(records_of_files(files, directories=False))

    async def get(self, paths: Sequence[str], *, max_bytes: int = DEFAULT_MAX_GET_BYTES) -> dict[str, bytes]:
        """See `Sandbox.get`."""
        wanted = {os.fsencode(path): path for path in paths}
        records = [ArchiveRecord(FILE, False, path) for path in wanted]
        with archive_file(records) as given:
            found = await self._files("fetch", given, max_bytes=max_bytes)
        return {wanted[record.path]: record.content for record in found if record.path in wanted}

    async def diff(self, base: str, *, max_bytes: int = DEFAULT_MAX_DIFF_BYTES) -> Patch:
        """See `Sandbox.diff`."""
        given = await acquire_in_thread(os.close, self._trees.open, base)
        try:
            changed = await self._files("compare", given, max_bytes=max_bytes)
        finally:
            os.close(given)
        before = await asyncio.to_thread(self._trees.files, base, {record.path for record in changed})
        entries = []
        for record in sorted(changed, key=lambda record: record.path):
            old, new = file_of(before.get(record.path)), file_of(record)
            if old is not None or new is not None:  # directories show by what is in them
                entries.append(PatchEntry(os.fsdecode(record.path), old, new))
        return Patch(tuple(entries))

    async def apply(self, patch: Patch) -> None:
        """See `Sandbox.apply`."""
        removed = [
            ArchiveRecord(ABSENT, False, os.fsencode(entry.path)) for entry in patch.entries if entry.after is None
        ]
        files = {entry.path: entry.after for entry in patch.entries if entry.after is not None}
        # what is removed goes first: a directory may have become a file
        await self._write([*removed, *records_of_files(files, directories=False)])

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        path = await acquire_in_thread(os.unlink, self._trees.scratch)
        try:
            with path.open("wb") as stream:
                await self._files("pack", None, max_bytes=self._limits.disk_bytes, into=stream.fileno())
            return await acquire_in_thread(self._trees.drop, self._trees.add_archive, path)
        except ArchiveError as error:
            raise SandboxError(f"the work tree could not be copied: {error}") from None
        finally:
            path.unlink(missing_ok=True)

    async def kill(self) -> None:
        """See `Sandbox.kill`."""
        if self._ended:
            return
        # how its programs end says nothing of them from now on, however long it takes to end
        self._killed = True
        # all others in its pid namespace end with the first process, and bubblewrap after it
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._processes.pidfd, signal.SIGKILL)
        ended = self._processes.ended
        await asyncio.wait((ended,), timeout=_KILL_S / 5)
        if not ended.done():
            self._link.kill(self._processes.bubblewrap, descendants=True)
            await asyncio.wait((ended,), timeout=_KILL_S)
        if not ended.done():
            raise SandboxError(f"sandbox {self._name} does not end within {_KILL_S:g} s")

    async def end_programs(self) -> None:
        """Kill all processes in the sandbox but its first one, because they use too much memory."""
        self.memory_kills += 1
        with contextlib.suppress(SandboxError):  # it may end meanwhile
            await self._request("kill_all", [])

    def evict(self) -> None:
        """End it because all sandboxes of the node use too much memory; its calls raise `SandboxEvictedError`."""
        if self._node_memory is None or not self.lives:
            return
        self._killed, self._evicted_for = True, self._node_memory.reason
        self._node_memory.evicted += 1
        _log.warning("sandbox %s is ended: %s", self._name, self._evicted_for)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._processes.pidfd, signal.SIGKILL)

    def _notice_kernel(self) -> None:
        """Evict it where the kernel ended processes of it because of the sum, and not because of its own limit."""
        cgroup = self._processes.cgroup
        if self._node_memory is None or cgroup is None or (kills := cgroup.oom_kills()) == self._kernel_kills:
            return
        self._kernel_kills = kills
        # the kernel counts a process that it ends in the group of that process, whichever group has no memory
        if not cgroup.reached_limit():
            self.evict()

    def _must_live(self) -> None:
        if self.lives:
            self._notice_kernel()
        if self._evicted_for:
            raise SandboxEvictedError(f"sandbox {self._name} was ended: {self._evicted_for}")
        if not self.lives:
            raise SandboxLostError(f"sandbox {self._name} has ended")

    def _finish(self) -> None:
        if not self._ended:
            self._ended = True
            os.close(self._processes.pidfd)
            self._on_end()

    async def _request(self, what: str, files: Sequence[int], **fields: Any) -> dict[str, Any]:
        processes = self._processes
        try:
            return await self._link.request(
                what,
                [processes.pidfd, processes.seccomp, *files],
                uid=processes.uid,
                namespaces=processes.namespaces,
                **{"cgroups": processes.cgroup.joins if processes.cgroup else (), **fields},
            )
        except OSError as error:
            self._must_live()
            raise SandboxError(f"sandbox {self._name}: {error}") from None

    async def prepare(self, tree: int | None) -> None:
        """Set options of its mounts, and fill the work tree from an open archive."""
        await self._files("unpack", tree, max_bytes=0, writes=True, remounts=tmpfs_options(self._limits, self._work))

    async def _write(self, records: Iterable[ArchiveRecord]) -> None:
        with archive_file(records) as given:
            await self._files("unpack", given, max_bytes=0, writes=True)

    async def _files(
        self,
        operation: str,
        given: int | None,
        *,
        max_bytes: int,
        writes: bool = False,
        into: int | None = None,
        remounts: Mapping[str, str] | None = None,
    ) -> list[ArchiveRecord]:
        """Run a file operation, and return its records.

        Written bytes count as the sandbox's memory. Read ones do not: a sandbox that has used up its memory can still
        be judged.
        """
        self._must_live()
        loop = asyncio.get_running_loop()
        answer = bytearray()
        kills = self._memory_kills()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        finished: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            data = read_available(reading)
            if data:
                answer.extend(data)
            if data == b"" or len(answer) > max_bytes + _PATHS_BYTES:
                loop.remove_reader(reading)
                finished.set_result(None)

        try:
            try:
                process = await self._request(
                    "files",
                    [writing if into is None else into, *([] if given is None else [given])],
                    operation=operation,
                    work=self._work,
                    max_bytes=max_bytes,
                    remounts=dict(remounts or {}),
                    limits={"NOFILE": 256, "CORE": 0},
                    **({} if writes else {"cgroups": ()}),
                )
            finally:
                os.close(writing)
            ended: asyncio.Future[int] = process["ended"]
            loop.add_reader(reading, read)
            try:
                done, _ = await asyncio.wait((finished,), timeout=_FILES_S)
                if done and len(answer) <= max_bytes + _PATHS_BYTES:
                    await asyncio.wait((ended,), timeout=_FILES_S)
            finally:
                if not ended.done():
                    self._link.kill(process["pid"])
            rc = await asyncio.shield(ended)
        finally:
            loop.remove_reader(reading)
            os.close(reading)
        self._must_live()
        if writes and self._memory_kills() > kills:
            raise SandboxLimitError(f"sandbox {self._name} has no memory for the files")
        if not done:
            raise SandboxError(f"sandbox {self._name}: a file operation took longer than {_FILES_S:g} s")
        if len(answer) > max_bytes + _PATHS_BYTES:
            raise SandboxLimitError(f"the files have more than {max_bytes} bytes")
        if into is not None:
            return []
        return records_of_answer(bytes(answer), max_bytes, rc)

    def _read(self, reading: int, output: ProgramOutput, *, once: bool = True) -> bool:
        data = read_available(reading)
        if data:
            output.add(data)
        # None: nothing to read now, which ends a drain
        return bool(data) or (once and data is None)

    def _memory_kills(self) -> int:
        return self.memory_kills + (self._processes.cgroup.oom_kills() if self._processes.cgroup else 0)

    def _cause(self, rc: int, kills_before: int) -> KilledBy | None:
        if self._memory_kills() > kills_before:
            return "memory"
        return "cpu" if rc in (-signal.SIGXCPU, 128 + signal.SIGXCPU) else None
