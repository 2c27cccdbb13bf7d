"""What the looks at the memory of sandboxes survive, and what gives back the room of a container."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.sandboxes import SandboxLimits, SandboxStartError, watcher
from hpcrl.sandboxes.bubblewrap_sandbox import BubblewrapSandbox
from hpcrl.sandboxes.command_runs import CommandRun
from hpcrl.sandboxes.container_commands import DockerCommands
from hpcrl.sandboxes.container_host import ContainerHost, ContainerSandbox
from hpcrl.sandboxes.node_memory import NodeMemory
from hpcrl.sandboxes.spawner_link import SandboxProcesses, SpawnerLink
from hpcrl.sandboxes.trees import TreeStore

MEASURED = "the memory of sandboxes could not be measured"


def member(tmp_path: Path, **options: float) -> NodeMemory:
    return NodeMemory(320, "a" * 32, base=tmp_path, **options)


async def test_a_look_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without them no sandbox would have a limit; a failure is reported once, however often it comes back."""
    monkeypatch.setattr(watcher, "INTERVAL_S", 0.001)
    looks = iter([KeyError("Pss"), OSError("busy"), {"a": 2 << 30}])
    ended = asyncio.Event()

    def used(looked_at: Any, near: Any) -> dict[str, int]:
        found = next(looks, {})
        if isinstance(found, Exception):
            raise found
        return found

    async def end_programs() -> None:
        ended.set()

    monkeypatch.setattr(watcher, "_used", used)
    limits = SandboxLimits(memory_bytes=1 << 30)
    sandbox = SimpleNamespace(pidfd=-1, limits=limits, work_directory="/work", end_programs=end_programs)
    watch = asyncio.create_task(watcher.watch_memory({"a": cast("BubblewrapSandbox", sandbox)}))
    waits = asyncio.create_task(ended.wait())
    await asyncio.wait((watch, waits), return_when=asyncio.FIRST_COMPLETED)
    assert not watch.done()
    watch.cancel()
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [MEASURED]


async def test_programs_of_a_sandbox_that_ends_meanwhile_need_no_end(tmp_path: Path) -> None:
    """The spawner finds no process to enter, before and after the sandbox was evicted."""

    class Link:
        async def request(self, what: str, files: object, **fields: object) -> dict[str, Any]:
            raise OSError("setns: No such process")

    processes = SandboxProcesses(1, asyncio.get_running_loop().create_future(), -1, [], None, None, -1)
    sandbox = BubblewrapSandbox(
        "a",
        processes,
        cast("SpawnerLink", Link()),
        TreeStore(tmp_path / "trees"),
        limits=SandboxLimits(),
        work_directory="/work",
        env={},
        on_end=lambda: None,
        node_memory=member(tmp_path),
    )
    await sandbox.end_programs()
    sandbox.evict()
    await sandbox.end_programs()
    assert sandbox.memory_kills == 2


async def test_a_removed_directory_leaves_the_limit_of_one_daemon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where systemd empties shared memory at a logout (RemoveIPC)."""
    memory = member(tmp_path, room_s=0.0)
    shutil.rmtree(next(tmp_path.iterdir()))
    assert memory.choose({"a": 310, "b": 100}) == ["a"]
    assert not memory.is_near(240)
    await memory.reserve("box", 300)
    with pytest.raises(SandboxStartError, match="found no room"):
        await memory.reserve("other", 30)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "do not count any more" in caplog.text
    memory.close()


def test_full_shared_memory_leaves_the_limit_of_one_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory still can be made there, and a file without content."""

    def refuse(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    memory = member(tmp_path)
    assert "sandboxes of other daemons do not count" in caplog.text
    assert memory.choose({"a": 311}) == ["a"]
    assert memory.choose({"a": 310}) == []


async def test_a_container_that_does_not_start_gives_its_room_back(tmp_path: Path) -> None:
    memory = member(tmp_path, room_s=0.0)
    directory = tmp_path / "private"
    directory.mkdir()
    host = ContainerHost(DockerCommands("docker"), directory, node_memory=memory)
    shutil.rmtree(directory)
    for _ in range(2):
        with pytest.raises(SandboxStartError, match=r"a container does not start: .*No such file"):
            await host.start(image="image", limits=SandboxLimits(memory_bytes=300))


async def test_a_container_ends_and_gives_its_room_back_though_its_caller_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout may be cancelled while it ends its container, which takes a second."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    ends: list[str] = []

    async def command(self: ContainerSandbox, argv: list[str], **options: object) -> CommandRun:
        begun.set()
        await go_on.wait()
        raise SandboxStartError("docker cannot be run")

    monkeypatch.setattr(ContainerSandbox, "_command", command)
    (tmp_path / "box").mkdir()
    sandbox = ContainerSandbox(
        "box",
        commands=DockerCommands("docker"),
        trees=TreeStore(tmp_path / "trees"),
        source=tmp_path / "box",
        limits=SandboxLimits(),
        work_directory="/work",
        env={},
        on_end=lambda: ends.append("box"),
    )
    first = asyncio.create_task(sandbox.kill())
    await begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go_on.set()
    # the second call waits for the same end, and says why the first step of it failed
    with pytest.raises(SandboxStartError):
        await sandbox.kill()
    assert ends == ["box"]
    assert not (tmp_path / "box").exists()
