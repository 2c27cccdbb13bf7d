"""Nothing is left of sandboxes when a process that they depend on is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

import psutil
import pytest
from process_words import words_of
from sandbox_groups import groups_of
from sandbox_lab import PACKAGES, USER, living, mark, skip_without_bubblewrap, until, user_python, with_argument

from hpcrl.processes.left_groups import CGROUP_ROOT, own_v1, remove_group_soon, remove_left, remove_left_groups
from hpcrl.sandboxes import Sandbox, SandboxLostError
from hpcrl.sandboxes.client import SandboxClient, SandboxDaemon

OWNER = Path(__file__).with_name("sandbox_owner.py")


@pytest.fixture(params=["root", "user"])
def who(request: pytest.FixtureRequest) -> dict[str, object]:
    """Options of `subprocess.Popen` for an owner as root, or as an ordinary user."""
    skip_without_bubblewrap()
    if request.param == "root":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        return {}
    return {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}


@pytest.fixture
def seconds() -> str:
    """What the owner's programs sleep."""
    return mark()


@pytest.fixture
def owner(who: dict[str, object], seconds: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a daemon and sandboxes."""
    process = start_owner(user_python() if who else sys.executable, who, seconds)
    yield process
    end(process)


def start_owner(python: str, options: dict[str, object], *arguments: str) -> subprocess.Popen[str]:
    # the test's own directory may be below one that only root enters
    source = OWNER.read_text()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PACKAGES)}
    return subprocess.Popen(
        [python, "-P", "-c", source, *arguments], stdout=subprocess.PIPE, text=True, env=environment, cwd="/", **options
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def report(process: subprocess.Popen[str]) -> dict[str, object]:
    stream: IO[str] | None = process.stdout
    assert stream is not None
    line = stream.readline()
    assert line, "the owner ended"
    return json.loads(line)


def spawner(daemon: psutil.Process) -> psutil.Process:
    (found,) = [each for each in daemon.children() if "hpcrl.sandboxes.spawner" in words_of(each)]
    return found


@pytest.mark.parametrize("victim", ["owner", "daemon", "spawner"])
async def test_killing_a_process(owner: subprocess.Popen[str], seconds: str, victim: str) -> None:
    said = report(owner)
    daemon = psutil.Process(int(str(said["daemon"])))
    await until(lambda: names(daemon).count("sleep") >= 3, what="programs do not start")
    assert names(daemon).count(".init") >= 3
    started = [daemon, *daemon.children(recursive=True)]
    {"owner": psutil.Process(owner.pid), "daemon": daemon, "spawner": spawner(daemon)}[victim].kill()
    await until(lambda: not living(started), what="processes are left")
    if victim == "owner":
        assert not Path(str(said["directory"])).exists()
    # the owner itself was told the number
    await until(lambda: {each.pid for each in with_argument(seconds)} <= {owner.pid}, what="programs are left")


async def ignored_signals(sandbox: Sandbox) -> int:
    """Return the mask of signals that a program in a sandbox ignores, without those that glibc keeps for itself."""
    found = await sandbox.exec(["grep", "-h", "SigIgn", "/proc/self/status"])
    return int(found.text.split()[1], 16) & sum(1 << number - 1 for number in signal.valid_signals())


def names(process: psutil.Process) -> list[str]:
    found = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(each.name())
    return found


async def test_a_stopped_daemon_does_not_keep_sandboxes(owner: subprocess.Popen[str]) -> None:
    """Its owner ends while it hangs: the process that starts sandboxes sees the owner's end, too."""
    said = report(owner)
    daemon = psutil.Process(int(str(said["daemon"])))
    started = daemon.children(recursive=True)
    daemon.suspend()
    owner.kill()
    await until(lambda: not living(started), what="processes are left")
    daemon.kill()


async def test_killing_a_client(daemon: SandboxDaemon) -> None:
    """Its sandboxes end, and those of others do not."""
    host = await SandboxClient.connect(daemon.directory)
    kept = await host.start()
    before = set(psutil.Process(daemon.pid).children(recursive=True))
    client = start_owner(sys.executable, {}, mark(), str(daemon.directory))
    try:
        report(client)
        started = [each for each in psutil.Process(daemon.pid).children(recursive=True) if each not in before]
        assert len(started) >= 9
    finally:
        end(client)
    await until(lambda: not living(started), what="processes are left")
    assert (await kept.exec(["echo", "lives"])).text == "lives\n"
    await host.close()


async def test_groups_of_a_killed_daemon(who: dict[str, object]) -> None:
    """The next daemon removes them."""
    if who or not Path("/sys/fs/cgroup/memory").is_dir():
        pytest.skip("needs root and control groups")
    owner = start_owner(sys.executable, who, mark())
    try:
        said = report(owner)
        pid = int(str(said["daemon"]))
        started = psutil.Process(pid).children(recursive=True)
        left = groups_of(pid, "/sys/fs/cgroup/memory")
        assert len(left) == 1
        psutil.Process(pid).kill()
        await until(lambda: not living(started), what="processes are left")
    finally:
        end(owner)
    daemon = SandboxDaemon()
    try:
        assert not left[0].exists()
    finally:
        daemon.stop()


async def test_killing_all_that_starts_sandboxes_at_once() -> None:
    """As with a node's processes, at any moment of a start: the next guard or daemon ends what is left.

    bubblewrap's child waits for it where it was killed early, and has no reader of its word where it was killed late.
    """
    skip_without_bubblewrap()
    skip_without_groups()
    for number in range(12):
        daemon = SandboxDaemon()
        client = await SandboxClient.connect(daemon.directory)
        starts = [asyncio.create_task(client.start()) for _ in range(4)]
        await asyncio.sleep(0.005 * number)
        own = psutil.Process(daemon.pid)
        starter = spawner(own)
        starter.suspend()  # it forks no more
        above = starter.children()
        for each in above:
            each.suspend()
        started = [own, *own.children(recursive=True)]
        for each in (starter, own, *above):
            each.kill()
        await asyncio.gather(*starts, return_exceptions=True)
        await client.close()
        daemon.stop()
        await until(partial(ended_with_groups, started), what="processes are left")


def ended_with_groups(started: list[psutil.Process]) -> bool:
    remove_left_groups()
    return not living(started)


def skip_without_groups() -> Path:
    """Return where this process makes groups."""
    place = own_v1(CGROUP_ROOT)[1]
    if os.geteuid() != 0 or place is None:
        pytest.skip("needs root and control groups")
    return place


def leave_group(place: Path, namespace: int) -> tuple[Path, subprocess.Popen[bytes]]:
    """Return a group of a daemon that has ended, with a process in it."""
    group = place / f"hpcrl-sandboxd-{namespace}-4194305-7"
    (group / "sandbox").mkdir(parents=True)
    process = subprocess.Popen(["sleep", "1000"])
    (group / "sandbox/cgroup.procs").write_text(str(process.pid))
    return group, process


@pytest.mark.parametrize("other", [False, True], ids=["own", "other"])
async def test_processes_in_a_group_of_a_killed_daemon(other: bool) -> None:
    """They are killed, but for those of a daemon whose number may mean another process."""
    place = skip_without_groups()
    own = os.stat("/proc/self/ns/pid").st_ino
    group, process = leave_group(place, own + other)
    try:
        began_s = time.monotonic()
        remove_left_groups()
        assert time.monotonic() - began_s < 60.0
        assert group.exists() == other
        assert (process.poll() is None) == other
    finally:
        process.kill()
        process.wait()
        if group.exists():
            remove_group_soon(group)


def test_a_process_that_may_not_be_killed_keeps_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another user: the next daemon makes its own groups all the same."""

    def refused(processes: object, number: int) -> None:
        raise PermissionError(number)

    monkeypatch.setattr("hpcrl.processes.left_groups.send_signal", refused)
    group = tmp_path / f"hpcrl-sandboxd-{os.stat('/proc/self/ns/pid').st_ino}-4194305-7"
    group.mkdir()
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
    remove_left(tmp_path)
    assert group.exists()


async def test_signals_to_a_group(daemon: SandboxDaemon, host: SandboxClient) -> None:
    """The spawner leaves it to the daemon what they mean, and programs do not inherit that."""
    await host.start()  # it has come so far as to ignore them
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        spawner(psutil.Process(daemon.pid)).send_signal(number)
    sandbox = await host.start()
    assert await ignored_signals(sandbox) == 0


async def test_ignored_signals_of_the_starter_are_not_inherited() -> None:
    """A shell ignores SIGINT and SIGQUIT in what it starts in the background."""
    skip_without_bubblewrap()
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        daemon = SandboxDaemon()
    finally:
        signal.signal(signal.SIGQUIT, before)
    try:
        client = await SandboxClient.connect(daemon.directory)
        sandbox = await client.start()
        assert await ignored_signals(sandbox) == 0
        await client.close()
    finally:
        daemon.stop()


async def test_kill_is_complete_when_it_returns(host: SandboxClient, daemon: SandboxDaemon) -> None:
    others = set(psutil.Process(daemon.pid).children(recursive=True))
    sandbox = await host.start()
    await sandbox.exec(["sh", "-c", "for n in 1 2 3 4 5; do setsid sleep 1000 > /dev/null 2>&1 & done; sleep 0.1"])
    started = [each for each in psutil.Process(daemon.pid).children(recursive=True) if each not in others]
    assert {each.name() for each in started} == {"bwrap", ".init", "sleep"}
    await sandbox.kill()
    assert not living(started)
    with pytest.raises(SandboxLostError, match="no sandbox"):
        await sandbox.exec(["true"])
    await sandbox.kill()


async def test_stopping_a_daemon_removes_its_directory() -> None:
    skip_without_bubblewrap()
    daemon = SandboxDaemon()
    client = await SandboxClient.connect(daemon.directory)
    sandbox = await client.start()
    started = psutil.Process(daemon.pid).children(recursive=True)
    daemon.stop()
    # a daemon that is late is killed, and its sandboxes end by that: they need a processor for it
    await until(lambda: not living(started), what="processes are left")
    assert not daemon.directory.exists()
    with pytest.raises(SandboxLostError, match="has ended"):
        await sandbox.exec(["true"])
    with pytest.raises(SandboxLostError, match="no daemon"):
        await SandboxClient.connect(daemon.directory)
    await client.close()
