"""Memory of all sandboxes of a node together: who ends, what its calls raise, and how daemons share a limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from patience import patience
from sandbox_lab import PACKAGES, USER, boxes, paths, skip_without_bubblewrap, until, user_python

from hpcrl.processes.environment_marks import SANDBOX_MEMORY_VARIABLE
from hpcrl.processes.left_groups import CGROUP_ROOT, group_name, own_v1, own_v2
from hpcrl.sandboxes import Sandbox, SandboxEvictedError, SandboxLimits, SandboxStartError
from hpcrl.sandboxes.cgroups import CgroupTree, SandboxCgroup
from hpcrl.sandboxes.client import SandboxClient, SandboxDaemon
from hpcrl.sandboxes.interface import MIB
from hpcrl.sandboxes.node_memory import NodeMemory
from hpcrl.sandboxes.watcher import INTERVAL_S

SUM = 128 * MIB
LIMITS = SandboxLimits(memory_bytes=96 * MIB, disk_bytes=90 * MIB, file_bytes=90 * MIB)


@pytest.fixture(scope="module", params=["root", "user"])
def daemons(request: pytest.FixtureRequest) -> Iterator[list[SandboxDaemon]]:
    """Two daemons whose sandboxes have 128 MiB together, with control groups (as root) or the watcher."""
    skip_without_bubblewrap()
    as_root = os.geteuid() == 0
    if request.param == "root" and not as_root:
        pytest.skip("needs root")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PYTHONPATH", os.pathsep.join(PACKAGES))
        patch.setenv(SANDBOX_MEMORY_VARIABLE, f"{SUM}:{secrets.token_hex(16)}")
        options = {"python": user_python(), "user": USER} if as_root and request.param == "user" else {}
        made = []
        for _ in range(2):
            made.append(SandboxDaemon(**options))
            stack.callback(made[-1].stop)
        yield made


@pytest.fixture
async def hosts(daemons: list[SandboxDaemon]) -> AsyncIterator[list[SandboxClient]]:
    """A client of each; their sandboxes end with the test."""
    clients = [await SandboxClient.connect(each.directory) for each in daemons]
    yield clients
    for each in clients:
        await each.close()
    await until(lambda: not any(boxes(psutil.Process(each.pid)) for each in daemons), what="sandboxes are left")
    await asyncio.sleep(2 * INTERVAL_S)  # until the other daemon knows it


async def hold(sandbox: Sandbox, mebibytes: int) -> asyncio.Task[object]:
    """Let a program of a sandbox take memory, and return the task of its call, which goes on."""
    program = f"data = b'x' * ({mebibytes} << 20); open('/work/held', 'w').close(); import time; time.sleep(300)"
    task: asyncio.Task[object] = asyncio.create_task(sandbox.exec(["python3", "-c", program], timeout_s=300))
    with contextlib.suppress(SandboxEvictedError):
        while not task.done() and not await sandbox.get(["held"]):
            await asyncio.sleep(0.05)
    return task


async def take(sandbox: Sandbox, mebibytes: int) -> None:
    """Let a program take memory until the sandbox is ended for it."""
    program = f"data = b'x' * ({mebibytes} << 20); import time; time.sleep(300)"
    with pytest.raises(SandboxEvictedError, match="all sandboxes of the node together used more than 128 MiB"):
        await sandbox.exec(["python3", "-c", program], timeout_s=300)


async def evicted(host: SandboxClient) -> int:
    return int((await host.describe())["evicted"])


@pytest.mark.parametrize("other", [0, 1], ids=["one daemon", "two daemons"])
async def test_the_largest_sandbox_ends_above_the_sum_and_no_other(hosts: list[SandboxClient], other: int) -> None:
    """Each of the three is within its own limit, and the largest may be of another daemon than the two."""
    before = await evicted(hosts[other])
    small = [await hosts[0].start(limits=LIMITS) for _ in range(2)]
    held = [await hold(each, 30) for each in small]
    large = await hosts[other].start(limits=LIMITS)
    await take(large, 70)
    # its later calls raise the same, so that no judge takes what is left of it
    with pytest.raises(SandboxEvictedError):
        await large.get(["held"])
    assert [task.done() for task in held] == [False, False]
    assert [(await each.exec(["true"])).rc for each in small] == [0, 0]
    assert await evicted(hosts[other]) == before + 1
    for task in held:
        task.cancel()


async def test_the_largest_ends_though_another_daemon_has_the_last_drop(hosts: list[SandboxClient]) -> None:
    large, small = await hosts[0].start(limits=LIMITS), await hosts[1].start(limits=LIMITS)
    held = await hold(large, 70)
    last = await hold(small, 60)
    with pytest.raises(SandboxEvictedError):
        await held
    assert not last.done()
    last.cancel()


async def test_files_in_memory_count(hosts: list[SandboxClient]) -> None:
    """The watcher ends the sandbox with the files. No process has their memory: between two looks the kernel ends the
    largest process, and one sandbox ends all the same.
    """
    full, other = await hosts[0].start(limits=LIMITS), await hosts[0].start(limits=LIMITS)
    assert (await full.exec(["sh", "-c", "head -c 75000000 /dev/zero > /work/file"])).rc == 0
    waits = asyncio.create_task(full.exec(["sleep", "300"], timeout_s=300))
    grows = await hold(other, 60)
    ended, lives = await asyncio.wait((waits, grows), timeout=60 * patience(), return_when=asyncio.FIRST_COMPLETED)
    assert [type(task.exception()) for task in ended] == [SandboxEvictedError]
    if not (await hosts[0].describe())["node_memory"].startswith("cgroup"):
        assert ended == {waits}
    await asyncio.wait(lives, timeout=1)
    assert len(lives) == 1
    assert not lives.pop().done()


async def test_above_its_own_limit_a_program_ends_and_its_sandbox_lives(hosts: list[SandboxClient]) -> None:
    before = await evicted(hosts[0])
    sandbox = await hosts[0].start(limits=LIMITS)
    found = await sandbox.exec(["python3", "-c", "data = b'x' * (110 << 20); import time; time.sleep(20)"])
    assert found.killed_by == "memory"
    assert (await sandbox.exec(["true"])).rc == 0
    assert await evicted(hosts[0]) == before


async def test_the_kernel_has_the_limit_where_there_are_groups(
    hosts: list[SandboxClient], daemons: list[SandboxDaemon]
) -> None:
    how = (await hosts[0].describe())["node_memory"]
    if not how.startswith("cgroup"):
        assert how == "watcher, 128 MiB"
        return
    version = int(how[len("cgroup v")])
    assert how == f"cgroup v{version}, watcher, 128 MiB"
    place = own_v2(CGROUP_ROOT) if version == 2 else own_v1(CGROUP_ROOT)[0]
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    assert place is not None
    assert (place / group_name(daemons[0].pid) / name).read_text().strip() == str(SUM)


_KERNEL = """
import os, sys
from hpcrl.sandboxes.cgroups import find_cgroups
from hpcrl.sandboxes.interface import SandboxLimits
tree, how = find_cgroups(os.getpid(), memory_bytes=64 << 20)
if tree is None:
    sys.exit("no groups: " + how)
for name, limit, taken in (("within", 90, 80), ("above", 30, 50)):
    group = tree.make(name, SandboxLimits(memory_bytes=limit << 20))
    if os.fork() == 0:
        for path in group.joins:
            with open(path, "w") as stream:
                stream.write("0")
        data = b"x" * (taken << 20)
        os._exit(0)
    signal = os.wait()[1]
    print(name, signal, group.oom_kills(), group.reached_limit())
    group.remove()
tree.remove()
"""


def test_what_the_kernel_ends_for_the_sum_differs_from_what_it_ends_for_one_limit() -> None:
    """Without the daemon's looks: a process within its group's limit and above the sum, and one above its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    found = subprocess.run(
        [sys.executable, "-c", _KERNEL], capture_output=True, text=True, check=False, cwd="/", env=paths()
    )
    if found.stderr.startswith("no groups"):
        pytest.skip(found.stderr)
    assert found.stdout.splitlines() == ["within 9 1 False", "above 9 1 True"], found.stderr


def test_kernel_of_version_2(tmp_path: Path) -> None:
    """The count `oom` of a group is of its own limit; `oom_kill` is of any."""
    group, tree = SandboxCgroup(2, (tmp_path,)), CgroupTree(2, (tmp_path,))
    for oom, kills in ((0, 0), (0, 1), (1, 2)):
        text = f"low 0\nhigh 0\nmax 9\noom {oom}\noom_kill {kills}\noom_group_kill 0\n"
        (tmp_path / "memory.events").write_text(text)
        assert (group.oom_kills(), group.reached_limit()) == (kills, oom > 0)
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\nactive_file 100\ninactive_file 200\n")
    assert (group.used(), tree.used()) == (600, 600)


def member(tmp_path: Path, limit: int = 320, **options: float) -> NodeMemory:
    return NodeMemory(limit, "a" * 32, base=tmp_path, **options)


def test_the_largest_end_first_until_the_others_fit(tmp_path: Path) -> None:
    """One part of 32 of the limit is left to the kernel."""
    memory = member(tmp_path)
    assert memory.choose({"a": 110, "b": 200}) == []
    assert memory.choose({"a": 110, "b": 201}) == ["b"]
    assert memory.choose({"a": 291, "b": 20, "c": 300}) == ["c", "a"]
    assert [memory.is_near(used) for used in (240, 241)] == [False, True]
    memory.close()
    assert list(tmp_path.iterdir()) == []


def test_daemons_of_a_limit_know_of_each_other(tmp_path: Path) -> None:
    first, second, stranger = member(tmp_path), member(tmp_path), NodeMemory(320, "b" * 32, base=tmp_path)
    assert first.choose({"a": 200}) == []
    assert stranger.choose({"x": 300}) == []
    # the largest sandbox is of the first one, which ends it when it looks
    assert second.choose({"b": 120, "c": 60}) == []
    assert second.is_near(41)
    assert first.choose({"a": 200}) == ["a"]
    assert second.choose({"b": 120, "c": 60}) == []
    # without a look at each sandbox the sum is an upper bound of the largest one
    second.publish(180, 180)
    assert first.choose({"d": 170}) == []
    assert second.choose({"b": 120, "c": 60}) == []
    assert first.choose({"d": 170}) == ["d"]
    second.close()
    assert first.choose({"d": 170}) == []
    first.close()
    stranger.close()


def test_a_daemon_that_hangs_does_not_keep_others_from_ending_theirs(tmp_path: Path) -> None:
    first, hangs = member(tmp_path), member(tmp_path)
    hangs.publish(200, 200)
    assert first.choose({"a": 120}) == []
    os.utime(next(path for path in tmp_path.glob("*/*") if path.read_bytes().startswith(b"%020d" % 200)), (0, 0))
    assert first.choose({"a": 120}) == ["a"]


def test_a_daemon_that_was_killed_does_not_count(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from hpcrl.sandboxes.node_memory import NodeMemory
memory = NodeMemory(320, "a" * 32, base=Path(sys.argv[1]))
memory.publish(200, 200)
print("ready", flush=True)
time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=paths()) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = member(tmp_path)
        assert first.is_near(41)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert first.choose({"a": 300}) == []
    first.close()
    assert list(tmp_path.iterdir()) == []


async def test_containers_have_room_for_their_limits(tmp_path: Path) -> None:
    """One waits until another ends, also that of another daemon; a limit above that of the node never has room."""
    first, second = member(tmp_path), member(tmp_path, room_s=0.1)
    await first.reserve("a", 200)
    with pytest.raises(SandboxStartError, match="hint: open fewer at once"):
        await second.reserve("b", 130)
    await second.reserve("b", 120)
    waits = asyncio.create_task(first.reserve("c", 100))
    await asyncio.wait((waits,), timeout=0.5)
    assert not waits.done()
    second.give_back("b")
    await waits
    with pytest.raises(SandboxStartError, match="found no room"):
        await first.reserve("d", 330)


def test_a_variable_names_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert NodeMemory.of({}) is None
    # a directory that cannot be made: the limit holds for this daemon alone
    memory = NodeMemory(320, "a" * 32, base=tmp_path / "absent")
    assert "sandboxes of other daemons do not count" in caplog.text
    assert memory.choose({"a": 320}) == ["a"]
    memory.close()
