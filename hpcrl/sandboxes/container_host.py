"""Sandboxes by a program that runs containers: Docker, Podman or Apptainer.

Files go in and out as tar streams, which are read here and never unpacked on the node. The image must have ``tar``,
``sh``, ``cat`` and ``kill``.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from hpcrl.processes.thread_resources import acquire_in_thread
from hpcrl.sandboxes.archive import ABSENT, DIRECTORY, FILE, LINK, ArchiveRecord, read_records
from hpcrl.sandboxes.bubblewrap import check_paths
from hpcrl.sandboxes.command_runs import CommandRun, run_command
from hpcrl.sandboxes.container_commands import ContainerCommands
from hpcrl.sandboxes.identities import FIRST_UID
from hpcrl.sandboxes.interface import (
    DEFAULT_MAX_DIFF_BYTES,
    DEFAULT_MAX_GET_BYTES,
    DEFAULT_MAX_OUTPUT_BYTES,
    DEFAULT_WORK_DIRECTORY,
    MIB,
    ExecResult,
    Patch,
    PatchEntry,
    SandboxError,
    SandboxFile,
    SandboxLimitError,
    SandboxLimits,
    SandboxLostError,
    SandboxStartError,
)
from hpcrl.sandboxes.node_memory import NodeMemory
from hpcrl.sandboxes.trees import TreeStore, file_of, records_of_files

_COMMAND_S = 120.0
_START_S = 60.0
_TRIES_EVERY_S = 0.1
_MESSAGE_BYTES = 4096
_TAR_OVERHEAD = 64 * MIB


class ContainerHost:
    """See `hpcrl.sandboxes.interface.SandboxHost`."""

    def __init__(self, commands: ContainerCommands, directory: Path, *, node_memory: NodeMemory | None = None) -> None:
        """Prepare; no container is started.

        Parameters
        ----------
        directory:
            Private directory for trees.
        node_memory:
            Limit of all sandboxes of the node together: the limits of all containers have room in it.
        """
        self._commands, self._directory, self._node_memory = commands, directory, node_memory
        self._trees = TreeStore(directory / "trees")
        self._numbers = count()
        self._sandboxes: dict[str, ContainerSandbox] = {}

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
        found = {"memory": self._commands.memory, "processes": "--pids-limit", "uid": str(FIRST_UID)}
        how = f"sum of {self._commands.memory}"
        return found if self._node_memory is None else found | self._node_memory.describe(how)

    async def start(
        self,
        *,
        image: str | None = None,
        tree: str | None = None,
        limits: SandboxLimits | None = None,
        work_directory: str = DEFAULT_WORK_DIRECTORY,
        mounts: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ContainerSandbox:
        """See `SandboxHost.start`."""
        if image is None:
            raise SandboxStartError("a container needs an image\n    hint: name one that is on the node already")
        check_paths(work_directory, mounts or {})
        name, limits = f"hpcrl-sandbox-{os.getpid()}-{next(self._numbers)}", limits or SandboxLimits()
        if self._node_memory is not None:
            await self._node_memory.reserve(name, limits.memory_bytes)
        source = self._directory / name
        try:
            source.mkdir(mode=0o700)
        except OSError as error:
            self._release(name)
            raise SandboxStartError(f"a container does not start: {error}") from None
        sandbox = ContainerSandbox(
            name,
            commands=self._commands,
            trees=self._trees,
            source=source,
            limits=limits,
            work_directory=work_directory,
            env=dict(env or {}),
            on_end=lambda: self._release(name),
        )
        self._sandboxes[name] = sandbox
        try:
            await sandbox.begin(image, mounts or {})
            if tree is not None:
                with os.fdopen(await acquire_in_thread(os.close, self._trees.open, tree), "rb") as stream:
                    await sandbox.unpack(list(read_records(stream)))
        except BaseException:
            await asyncio.shield(sandbox.kill())
            raise
        return sandbox

    async def close(self) -> None:
        """End all containers."""
        await asyncio.gather(*(each.kill() for each in list(self._sandboxes.values())), return_exceptions=True)

    def release(self) -> None:
        """Give up what containers used, after `close`."""
        if self._node_memory is not None:
            self._node_memory.close()

    def _release(self, name: str) -> None:
        self._sandboxes.pop(name, None)
        if self._node_memory is not None:
            self._node_memory.give_back(name)


class ContainerSandbox:
    """See `hpcrl.sandboxes.interface.Sandbox`."""

    def __init__(
        self,
        name: str,
        *,
        commands: ContainerCommands,
        trees: TreeStore,
        source: Path,
        limits: SandboxLimits,
        work_directory: str,
        env: dict[str, str],
        on_end: Callable[[], None],
    ) -> None:
        """Prepare; `begin` starts it, and ``on_end`` is called once when it has ended."""
        self._on_end = on_end
        self._name, self._commands, self._trees, self._source = name, commands, trees, source
        self._limits, self._work, self._env = limits, work_directory, {"HOME": "/tmp", "LANG": "C.UTF-8", **env}
        self._holder: subprocess.Popen[bytes] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """See `Sandbox.id`."""
        return self._name

    async def begin(self, image: str, mounts: Mapping[str, str]) -> None:
        """Start the container and wait until programs run in it.

        Raises
        ------
        SandboxStartError
            It does not start; the message has the output of the program.
        """
        argv = self._commands.start(
            self._name,
            image,
            limits=self._limits,
            work_directory=self._work,
            work_source=str(self._source),
            mounts=mounts,
        )
        try:
            if not self._commands.attached:
                run = await self._command(argv)
                if run.rc:
                    raise SandboxStartError(f"{argv[0]} says: {_text(run)}")
                return
            # it lives as long as its input, which ends with us; in this thread, since a daemon has one
            self._holder = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxStartError(f"{argv[0]} cannot be run: {error.strerror or error}") from None
        deadline = asyncio.get_running_loop().time() + _START_S
        while (run := await self._command(self._exec_argv(["true"]))).rc:
            if self._holder.poll() is not None or asyncio.get_running_loop().time() > deadline:
                raise SandboxStartError(f"{argv[0]} says: {_text(run)}\n    hint: is the image {image} on this node?")
            await asyncio.sleep(_TRIES_EVERY_S)

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
        """See `Sandbox.exec`. What is left after a timeout is ended together with all other programs in it."""
        self._must_live()
        if not argv or any("\0" in word for word in argv):
            raise SandboxError("a program needs a name, and no argument may have a NUL")
        run = await run_command(
            self._exec_argv(argv, cwd=cwd, env=env),
            stdin=stdin,
            timeout_s=timeout_s,
            max_output=max_output,
            output_limit=self._limits.output_bytes,
        )
        if run.killed_by is not None:
            # the program of containers was killed here, and the one in the container was not
            await self._command(self._exec_argv(["sh", "-c", "kill -9 -1"]))
        # 128 + n is what these programs give for a signal
        rc = -signal.SIGKILL if run.killed_by else run.rc
        return ExecResult(rc, run.output.content(), run.output.truncated, run.killed_by, run.wall_s, run.output.total)

    async def put(self, files: Mapping[str, bytes | SandboxFile]) -> None:
        """See `Sandbox.put`."""
        await self.unpack(records_of_files(files, directories=False))

    async def get(self, paths: Sequence[str], *, max_bytes: int = DEFAULT_MAX_GET_BYTES) -> dict[str, bytes]:
        """See `Sandbox.get`."""
        self._must_live()
        found = {}
        left = max_bytes
        for path in paths:
            run = await self._command(
                self._exec_argv(["sh", "-c", 'test -f "$1" && cat -- "$1"', "get", os.path.join(self._work, path)]),
                max_output=left + 1,
            )
            if run.rc == 0:
                left -= run.output.total
                if left < 0:
                    raise SandboxLimitError(f"the files have more than {max_bytes} bytes")
                found[path] = run.output.content()
        return found

    async def diff(self, base: str, *, max_bytes: int = DEFAULT_MAX_DIFF_BYTES) -> Patch:
        """See `Sandbox.diff`."""
        with os.fdopen(await acquire_in_thread(os.close, self._trees.open, base), "rb") as stream:
            before = {record.path: record for record in read_records(stream)}
        after = {record.path: record for record in await self._pack()}
        entries = []
        for path in sorted(before.keys() | after.keys()):
            old, new = before.get(path), after.get(path)
            if old != new and (file_of(old) or file_of(new)):
                entries.append(PatchEntry(os.fsdecode(path), file_of(old), file_of(new)))
        if sum(len(entry.after.content) for entry in entries if entry.after) > max_bytes:
            raise SandboxLimitError(f"the files have more than {max_bytes} bytes")
        return Patch(tuple(entries))

    async def apply(self, patch: Patch) -> None:
        """See `Sandbox.apply`."""
        removed = [ArchiveRecord(ABSENT, False, os.fsencode(each.path)) for each in patch.entries if each.after is None]
        files = {entry.path: entry.after for entry in patch.entries if entry.after is not None}
        await self.unpack([*removed, *records_of_files(files, directories=False)])

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        return await acquire_in_thread(self._trees.drop, self._trees.add, await self._pack())

    async def kill(self) -> None:
        """See `Sandbox.kill`."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        # a caller that gives up must leave neither the container nor the room that it has
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        try:
            await self._command(self._commands.kill(self._name))
        finally:
            if self._holder is not None:
                assert self._holder.stdin is not None
                with contextlib.suppress(OSError):
                    self._holder.stdin.close()
                self._holder.kill()
                await asyncio.to_thread(self._holder.wait)
            await asyncio.to_thread(shutil.rmtree, self._source, ignore_errors=True)
            self._on_end()

    async def unpack(self, records: Iterable[ArchiveRecord]) -> None:
        """Write records into the work tree."""
        records = list(records)
        self._must_live()
        if removed := [os.fsdecode(record.path) for record in records if record.kind == ABSENT]:
            await self._must(await self._command(self._exec_argv(["rm", "-rf", "--", *removed])))
        options = ["tar", "-x", "-f", "-", "-C", self._work, "--no-same-owner", "-P"]
        await self._must(await self._command(self._exec_argv(options), stdin=_to_tar(records)))

    async def _pack(self) -> list[ArchiveRecord]:
        self._must_live()
        limit = self._limits.disk_bytes + _TAR_OVERHEAD
        argv = self._exec_argv(["sh", "-c", 'cd "$1" && tar -c -f - . 2> /dev/null', "pack", self._work])
        run = await self._command(argv, max_output=limit)
        if run.output.truncated:
            raise SandboxLimitError(f"the work tree has more than {limit} bytes")
        return _from_tar(run.output.content())

    async def _must(self, run: CommandRun) -> None:
        if run.rc:
            text = _text(run)
            raise SandboxLimitError(text) if "No space left" in text else SandboxError(text)

    async def _command(self, argv: list[str], *, stdin: bytes = b"", max_output: int = _MESSAGE_BYTES) -> CommandRun:
        limit = max_output + MIB
        try:
            return await run_command(argv, stdin=stdin, timeout_s=_COMMAND_S, max_output=max_output, output_limit=limit)
        except OSError as error:
            raise SandboxStartError(f"{argv[0]} cannot be run: {error.strerror or error}") from None

    def _exec_argv(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> list[str]:
        where = os.path.join(self._work, cwd or "").rstrip("/") or "/"
        return self._commands.exec(self._name, argv, cwd=where, env={**self._env, **(env or {})})

    def _must_live(self) -> None:
        if self._ending is not None or (self._holder is not None and self._holder.poll() is not None):
            raise SandboxLostError(f"sandbox {self._name} has ended")


def _text(run: CommandRun) -> str:
    return run.output.content().decode("utf-8", "replace").strip() or f"exit code {run.rc}"


def _to_tar(records: Iterable[ArchiveRecord]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", errors="surrogateescape") as tar:
        for record in records:
            if record.kind == ABSENT:
                continue
            info = tarfile.TarInfo(os.fsdecode(record.path))
            info.mode = 0o755 if record.executable or record.kind == DIRECTORY else 0o644
            if record.kind == DIRECTORY:
                info.type = tarfile.DIRTYPE
            elif record.kind == LINK:
                info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(record.content)
            else:
                info.size = len(record.content)
            tar.addfile(info, io.BytesIO(record.content) if record.kind == FILE else None)
    return buffer.getvalue()


def _from_tar(data: bytes) -> list[ArchiveRecord]:
    """Return the records of a tar stream, sorted; only names and contents are read, and nothing is unpacked."""
    records = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as tar:
            for info in tar:
                path = os.path.normpath(os.fsencode(info.name))
                if path == b"." or path.startswith((b"/", b"../")):
                    continue
                if info.isdir():
                    records[path] = ArchiveRecord(DIRECTORY, False, path)
                elif info.issym():
                    records[path] = ArchiveRecord(LINK, False, path, os.fsencode(info.linkname))
                elif info.isreg() or info.islnk():
                    stream = tar.extractfile(info)
                    content = b"" if stream is None else stream.read()
                    records[path] = ArchiveRecord(FILE, bool(info.mode & 0o111), path, content)
    except (tarfile.TarError, KeyError) as error:
        raise SandboxError(f"the work tree could not be read: {error}") from None
    return [records[path] for path in sorted(records)]
