"""What a cancelled call was about to make has no owner, and is removed: trees, open files, directories, the daemon."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from patience import patience

from hpcrl.rollouts.environments.harness.program import run_program
from hpcrl.sandboxes import client
from hpcrl.sandboxes.bubblewrap_host import BubblewrapHost
from hpcrl.sandboxes.client import SandboxClient, local_sandboxes
from hpcrl.sandboxes.container_host import ContainerHost
from hpcrl.sandboxes.messages import (
    CALLS,
    AddTreeCall,
    CallAnswer,
    CancelCall,
    DropTreeCall,
    SandboxCall,
    SnapshotCall,
    encode,
    read_message,
    value_of,
)
from hpcrl.sandboxes.trees import TreeStore, records_of_files

FILES = {"a.py": b"x = 1\n" * 3000}


class Held:
    """Runs a function, and lets its caller have the result only when ``gate`` is open."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.made, self.gate = threading.Event(), threading.Event()
        self.results: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.results.append(self._function(*args, **kwargs))
        self.made.set()
        assert self.gate.wait(60)
        return self.results[-1]


async def settle(condition: Callable[[], bool]) -> None:
    """Wait until a thread has done what is asked for."""
    async with asyncio.timeout(20 * patience()):
        while not condition():
            await asyncio.sleep(0.005)


async def give_up(call: Awaitable[Any], held: Held) -> None:
    """Cancel a call after its thread has made something, and before the call has it."""
    task = asyncio.ensure_future(call)
    await settle(held.made.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.gate.set()


def host(kind: str, directory: Path) -> Any:
    """Return a host without what starts sandboxes: trees alone."""
    if kind == "containers":
        return ContainerHost(None, directory)  # type: ignore[arg-type]
    bare = object.__new__(BubblewrapHost)
    bare._trees = TreeStore(directory / "trees")
    return bare


@pytest.mark.parametrize("kind", ["bubblewrap", "containers"])
async def test_a_tree_of_a_cancelled_call_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    here = host(kind, tmp_path)
    held = Held(here._trees.add)
    monkeypatch.setattr(here._trees, "add", held)
    await give_up(here.add_tree(FILES), held)
    await settle(lambda: not os.listdir(tmp_path / "trees"))


async def test_a_directory_of_a_cancelled_call_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.py").write_bytes(b"x = 1\n")
    here = host("bubblewrap", tmp_path)
    held = Held(here._trees.add_directory)
    monkeypatch.setattr(here._trees, "add_directory", held)
    await give_up(here.add_tree(tmp_path / "source"), held)
    await settle(lambda: not os.listdir(tmp_path / "trees"))


async def test_a_tree_that_a_cancelled_start_has_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = host("bubblewrap", tmp_path)
    tree = await here.add_tree(FILES)
    held = Held(here._trees.open)
    monkeypatch.setattr(here._trees, "open", held)
    await give_up(here._fill(None, tree), held)

    def closed() -> bool:
        return not os.path.exists(f"/proc/self/fd/{held.results[0]}")

    await settle(closed)


async def test_the_directory_of_a_cancelled_program_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tempfile.mkdtemp)
    monkeypatch.setattr(tempfile, "mkdtemp", held)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    call = run_program(["true"], task=b"{}", environ={}, words={}, time_limit_s=5.0, max_bytes=100)
    await give_up(call, held)
    await settle(lambda: not os.listdir(tmp_path))


async def test_a_daemon_that_was_started_for_a_cancelled_call_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    class Daemon:
        def __init__(self, **options: object) -> None:
            held("daemon")

        def stop(self) -> None:
            stopped.append("daemon")

    held = Held(str)
    monkeypatch.setattr(client, "SandboxDaemon", Daemon)
    await give_up(local_sandboxes().__aenter__(), held)
    await settle(lambda: bool(stopped))


@pytest.mark.parametrize("what", [AddTreeCall(b"", {}), SnapshotCall("sandbox-1")])
async def test_a_tree_that_was_made_before_the_daemon_read_of_the_cancel_is_dropped(
    tmp_path: Path, what: AddTreeCall | SnapshotCall
) -> None:
    calls: list[SandboxCall] = []
    ended = asyncio.Event()
    tree = "0" * 40

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (data := await read_message(reader)) is not None:
            calls.append(CALLS.decode(data))
            if isinstance(calls[-1].what, CancelCall):  # too late: the tree is there already
                writer.write(encode(CallAnswer(calls[-1].what.number, value_of(tree))))
        writer.close()
        await writer.wait_closed()
        ended.set()

    server = await asyncio.start_unix_server(serve, tmp_path / "socket")
    here = SandboxClient(*await asyncio.open_unix_connection(tmp_path / "socket"))
    try:
        task = asyncio.create_task(here.call(what, str))
        await settle(lambda: len(calls) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(lambda: len(calls) == 3)
        assert calls[2].what == DropTreeCall(tree)
    finally:
        await here.close()
        await ended.wait()
        server.close()


def test_a_tree_that_is_dropped_while_it_is_added_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts of a group give the same tree, each in a thread, while others end."""
    store = TreeStore(tmp_path / "trees")
    name = store.add(records_of_files(FILES))
    rename, dropping = os.rename, threading.Thread(target=store.drop, args=(name,))

    def slow(source: Any, target: Any) -> None:
        rename(source, target)
        dropping.start()
        dropping.join(0.3)

    monkeypatch.setattr(os, "rename", slow)
    assert store.add(records_of_files(FILES)) == name
    dropping.join(60)
    os.close(store.open(name))
    store.drop(name)
    assert not os.listdir(tmp_path / "trees")


def test_a_tree_that_is_added_again_is_whole_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may open it at any moment: what replaces it must be on disk when it gets its name."""
    store = TreeStore(tmp_path / "trees")
    records = list(records_of_files({f"{number}.py": b"x = 1\n" for number in range(20)}))
    whole = (tmp_path / "trees" / store.add(records)).read_bytes()
    rename, seen = os.rename, []

    def look(source: Any, target: Any) -> None:
        rename(source, target)
        seen.append(Path(target).read_bytes())

    monkeypatch.setattr(os, "rename", look)
    store.add(records)
    assert seen == [whole]
