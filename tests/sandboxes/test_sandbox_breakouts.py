"""Attacks from inside of a sandbox, as root and as an ordinary user: none succeeds."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sandbox_lab import SECRET, SMALL, USER, living, mark, python, until, with_argument

from hpcrl.sandboxes import Sandbox, SandboxError, SandboxFile
from hpcrl.sandboxes.client import SandboxClient, SandboxDaemon
from hpcrl.sandboxes.interface import MIB
from hpcrl.sandboxes.seccomp import SYSTEM_CALLS

FILL = """
import os
written = 0
try:
    for number in range(10**6):
        with open(f"{DIRECTORY}/{number}", "wb", buffering=0) as stream:
            for _ in range(64):
                written += stream.write(bytes(65536))
except OSError as error:
    print(error.errno)
print(written)
"""


async def test_fork_bomb(daemon: SandboxDaemon, sandbox: Sandbox) -> None:
    """It is stopped by a count, it does not keep us from entering, and it ends with its program."""
    program = "import os\nwhile True:\n try:\n  os.fork()\n except OSError:\n  pass"
    bomb = asyncio.create_task(sandbox.exec(["/usr/bin/python3", "-c", program], timeout_s=2))
    await asyncio.sleep(1.5)
    processes = psutil.Process(daemon.pid).children(recursive=True)
    assert len(processes) < SMALL.processes + 20
    assert (await bomb).killed_by == "timeout"
    assert (await sandbox.exec(["true"])).rc == 0


async def test_memory_in_sum(sandbox: Sandbox) -> None:
    """Each process has less than the limit, and all together have more."""
    program = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        data = b"x" * (60 << 20)
        time.sleep(10)
        os.write(1, b"kept ")
        os._exit(0)
for _ in range(6):
    os.wait()
"""
    found = await sandbox.exec(["/usr/bin/python3", "-c", program], timeout_s=60)
    assert found.killed_by == "memory"
    assert found.text.count("kept") < 6
    assert (await sandbox.exec(["true"])).rc == 0


async def test_memory_outside_of_processes(sandbox: Sandbox) -> None:
    """Memory of no process: files without a name, System V shared memory. It counts, or it cannot be had."""
    program = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
got = 0
try:
    for number in range(12):
        fd = os.memfd_create("x")
        for _ in range(30):
            got += os.write(fd, bytes(1 << 20))
except OSError:
    pass
for number in range(12):
    segment = libc.shmget(number + 1, 30 << 20, 0o1600)
    if segment < 0:
        break
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(segment, None, 0)
    ctypes.memset(address, 1, 30 << 20)
    libc.shmdt(ctypes.c_void_p(address))
    got += 30 << 20
print(got)
"""
    found = await sandbox.exec(["/usr/bin/python3", "-c", program])
    assert found.killed_by == "memory" or int(found.text) == 0


@pytest.mark.parametrize(
    ("directory", "most"),
    [
        ("/work", SMALL.disk_bytes),
        ("/tmp", SMALL.scratch_bytes),
        ("/dev/shm", SMALL.shm_bytes),
        ("/var/tmp", SMALL.scratch_bytes),
        ("/dev", 0),
        ("/", 0),
        ("/etc", 0),
        ("/usr", 0),
        ("/proc", 0),
        ("$HOME", SMALL.scratch_bytes),
    ],
)
async def test_filling_directories(sandbox: Sandbox, directory: str, most: int) -> None:
    found = await python(sandbox, f"import os\nDIRECTORY = os.path.expandvars({directory!r})\n{FILL}")
    assert int(found.split()[-1]) <= most


async def test_many_small_files(sandbox: Sandbox) -> None:
    program = """
import os
for directory in ("/work", "/tmp", "/dev/shm"):
    made = 0
    try:
        for number in range(10**6):
            os.mkdir(f"{directory}/{number}") if number % 2 else open(f"{directory}/{number}", "w").close()
            made += 1
    except OSError:
        print(made)
"""
    assert all(0 < int(made) <= SMALL.inodes for made in (await python(sandbox, program)).split())


async def test_endless_output(sandbox: Sandbox) -> None:
    found = await sandbox.exec(["sh", "-c", "cat /dev/zero"], timeout_s=60, max_output=1000)
    assert (found.killed_by, found.truncated, len(found.out)) == ("output", True, 1000)
    assert found.out_bytes < SMALL.output_bytes + MIB


async def test_output_without_newline(sandbox: Sandbox) -> None:
    found = await sandbox.exec(
        ["sh", "-c", "printf start; head -c 3000000 /dev/zero | tr '\\0' x; printf end"], max_output=100
    )
    assert found.killed_by is None
    assert found.out_bytes == 3_000_008
    assert (found.out[:6], found.out[-4:], len(found.out)) == (b"startx", b"xend", 100)


async def test_never_reading_input(sandbox: Sandbox) -> None:
    found = await sandbox.exec(["sh", "-c", "sleep 0.1; echo done"], stdin=bytes(4 * MIB))
    assert (found.rc, found.text) == (0, "done\n")


async def test_input_cannot_be_changed(sandbox: Sandbox) -> None:
    """It is memory of ours: a program that could let it grow would have memory without a limit."""
    program = "import os; f = os.open('/proc/self/fd/0', os.O_RDWR); print(os.write(f, b'y' * 100))"
    found = await sandbox.exec(["/usr/bin/python3", "-c", program], stdin=b"x" * 100)
    assert found.rc == 1
    assert "PermissionError" in found.text or "Errno 1" in found.text


async def test_environment_of_the_daemon(sandbox: Sandbox) -> None:
    found = await sandbox.exec(["sh", "-c", "env; cat /proc/*/environ /proc/*/cmdline /proc/1/maps"])
    assert "HOME=" in found.text
    assert SECRET not in found.text


async def test_files_of_the_node(sandbox: Sandbox, daemon: SandboxDaemon, tmp_path: Path) -> None:
    """Neither run directories nor tokens, nor the daemon's own directory."""
    (tmp_path / "token").write_text(SECRET)
    hidden = [
        str(tmp_path / "token"),
        str(daemon.directory / "secret"),
        "/root",
        "/home",
        "/sys",
        "/run",
        "/etc/shadow",
    ]
    program = f"import os\nfor path in {hidden}:\n print(os.path.exists(path))"
    assert set((await python(sandbox, program)).split()) == {"False"}


async def test_core_pattern(sandbox: Sandbox) -> None:
    """Host root could write it from every user namespace: sandboxes run as another user."""
    pattern = Path("/proc/sys/kernel/core_pattern")
    before = pattern.read_text()
    found = await sandbox.exec(
        ["sh", "-c", "echo '|/tmp/x' > /proc/sys/kernel/core_pattern; echo b > /proc/sysrq-trigger"]
    )
    assert found.rc != 0
    assert pattern.read_text() == before


async def test_never_root_on_the_node(daemon: SandboxDaemon, sandbox: Sandbox) -> None:
    seconds = mark()
    program = asyncio.create_task(sandbox.exec(["sleep", seconds], timeout_s=30))
    await until(lambda: bool(with_argument(seconds)), what="the program does not start")
    (process,) = with_argument(seconds)
    assert process.uids().real >= min(70000, USER)
    assert set(process.uids()) == {process.uids().real}
    process.kill()
    assert (await program).rc == -9


async def test_nested_user_namespace(sandbox: Sandbox) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) if os.uname().machine == "x86_64" else -1)
"""
    assert await python(sandbox, program) == "-1 -1\n"
    assert (await sandbox.exec(["unshare", "-Ur", "true"])).rc != 0
    assert (await sandbox.exec(["sh", "-c", "cat /proc/self/uid_map"])).text.split() == ["1000", "0", "1"]


async def test_mounts(sandbox: Sandbox) -> None:
    script = "mount -t tmpfs none /tmp; umount /usr; umount -l /work; mount -o remount,rw /usr; touch /usr/x"
    script += "; mknod /tmp/sda b 8 0"
    await sandbox.exec(["sh", "-c", script])
    found = await sandbox.exec(["sh", "-c", "ls /usr/x /tmp/sda; grep -c ' /tmp ' /proc/mounts; ls -d /usr/bin"])
    assert found.text.split("\n")[-3:] == ["1", "/usr/bin", ""]
    assert not Path("/usr/x").exists()


async def test_refused_system_calls(sandbox: Sandbox) -> None:
    """Each is refused by the filter, whatever its arguments are."""
    numbers = [call[0 if os.uname().machine == "x86_64" else 1] for call in SYSTEM_CALLS.values()]
    program = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number in {[number for number in numbers if number is not None] + [435]}:
    ctypes.set_errno(0)
    found = libc.syscall(number, 0, 0, 0, 0, 0, 0)
    if found != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print(number, found, ctypes.get_errno())
"""
    assert await python(sandbox, program) == ""


async def test_other_programs_memory(sandbox: Sandbox) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, 0, 0))
for path in ("/proc/1/mem", "/proc/kcore", "/proc/kmem", "/dev/mem"):
    try:
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, b"x", 0x400100)
        print("wrote", path)
    except OSError:
        pass
"""
    assert await python(sandbox, program) == "-1\n"


async def test_signals_to_outside(sandbox: Sandbox, daemon: SandboxDaemon) -> None:
    """Not even to a process of the same user, or to the one that holds the sandbox."""
    other = subprocess.Popen(["sleep", "1000"], user=USER if os.geteuid() == 0 else None)
    try:
        program = f"""
import os, signal
for pid in (1, {other.pid}, {daemon.pid}, -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        print(error.errno)
"""
        await sandbox.exec(["/usr/bin/python3", "-c", program])
        assert (await sandbox.exec(["echo", "lives"])).text == "lives\n"
        assert other.poll() is None
        assert daemon.lives
    finally:
        other.kill()
        other.wait()


@pytest.fixture
def listeners() -> Iterator[tuple[int, str]]:
    """A port on loopback, and an abstract unix socket."""
    name = f"hpcrl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        yield tcp.getsockname()[1], name


async def test_network(host: SandboxClient, listeners: tuple[int, str]) -> None:
    """No host loopback, no abstract sockets, no host of a virtual machine; with the node's network both answer."""
    port, name = listeners
    program = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, {chr(0) + name!r})):
    try:
        socket.socket(family).connect(address)
        print("connected")
    except OSError:
        print("refused")
for family in (40, 17, 38):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print("made", family)
    except OSError:
        pass
"""
    assert await python(await host.start(limits=SMALL), program) == "refused\nrefused\n"
    open_limits = dataclasses.replace(SMALL, network="host")
    assert await python(await host.start(limits=open_limits), program) == "connected\nconnected\n"


async def test_links_in_fetched_files(sandbox: Sandbox, tmp_path: Path) -> None:
    """A link leads to files of the sandbox, never to those of the node."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o644)
    links = f"ln -s {tmp_path}/secret a; ln -s /etc/passwd b; ln -s ../../../../../..{tmp_path} c"
    links += "; mkfifo d; ln -s /dev/zero e"
    await sandbox.exec(["sh", "-c", links])
    found = await sandbox.get(
        ["a", "b", "c/secret", "d", "e", "../../..//etc/passwd", str(tmp_path / "secret"), "/proc/1/environ"]
    )
    assert found.keys() == {"b", "../../..//etc/passwd"}
    assert found["b"].startswith(b"agent:")
    patch = await sandbox.diff(await _empty_tree(sandbox))
    assert {entry.path: entry.after for entry in patch.entries}["a"] == SandboxFile(
        str(tmp_path / "secret").encode(), link=True
    )


async def _empty_tree(sandbox: Sandbox) -> str:
    """A tree with one file, which the work tree does not have."""
    return await sandbox._client.add_tree({"z": b""})  # type: ignore[attr-defined]


async def test_writing_through_links(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec(
        ["sh", "-c", f"ln -s /tmp/target file; ln -s /tmp directory; mkdir -p /tmp{tmp_path}; ln -s {tmp_path} out"]
    )
    await sandbox.put({"file": b"new", "directory/below": b"new"})
    found = await sandbox.exec(["sh", "-c", "cat file; ls /tmp/below /tmp/target"])
    assert (found.text[:3], found.text[-10:], found.rc) == ("new", "tmp/below\n", 2)
    with pytest.raises(SandboxError):
        await sandbox.put({"out/file": b"new"})
    assert list(tmp_path.iterdir()) == []


async def test_setuid_programs(sandbox: Sandbox) -> None:
    script = """
cp /usr/bin/id /work/id; chmod 4755 /work/id; /work/id -u
for program in $(find /usr/bin /usr/sbin -perm -4000); do echo $program; done
su -c 'id -u' root < /dev/null; passwd -S root < /dev/null
python3 -c 'import os; os.setuid(0)'
"""
    found = await sandbox.exec(["sh", "-c", script], timeout_s=60)
    lines = found.text.split("\n")
    assert lines[0] == "1000"
    assert "0" not in lines
    assert "Error" in lines[-2]


async def test_programs_in_the_background(host: SandboxClient) -> None:
    """They neither delay a return, nor outlive the sandbox; after a timeout they are ended with their program."""
    detach = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "%s"])
    os._exit(0)
"""
    kept, *ended = (mark() for _ in range(3))
    sandbox = await host.start(limits=SMALL)
    found = await sandbox.exec(["/usr/bin/python3", "-c", detach % kept], timeout_s=30)
    assert (found.rc, found.killed_by) == (0, None)
    found = await sandbox.exec(["/usr/bin/python3", "-c", detach % ended[0] + "time.sleep(60)"], timeout_s=1)
    assert found.killed_by == "timeout"
    found = await sandbox.exec(["sh", "-c", f"sleep {ended[1]} & setsid sleep {ended[1]} & sleep 60"], timeout_s=1)
    assert found.killed_by == "timeout"
    # a killed process needs a processor to end, and the call waits for its own one alone
    await until(lambda: not with_argument(ended[0]) and not with_argument(ended[1]), what="programs outlive a timeout")
    left = with_argument(kept)
    assert len(left) == 1
    await sandbox.kill()
    assert not living(left)


async def test_names_of_files(host: SandboxClient) -> None:
    """Names with newlines and bytes that are no text come through each way unchanged."""
    names = ["new\nline", os.fsdecode(b"\xff\xfe.py"), " blank ", "-rf", "a\\n", "ünï"]
    sandbox = await host.start(limits=SMALL)
    empty = await sandbox.snapshot()
    await sandbox.put({f"d/{name}": name.encode("utf-8", "surrogateescape") for name in names})
    paths = [f"d/{name}" for name in names]
    wanted = {path: path[2:].encode("utf-8", "surrogateescape") for path in paths}
    assert await sandbox.get(paths) == wanted
    assert sorted((await sandbox.diff(empty)).paths, key=os.fsencode) == sorted(paths, key=os.fsencode)
    copy = await host.start(tree=await sandbox.snapshot(), limits=SMALL)
    assert await copy.get(paths) == wanted
    assert (await copy.exec(["cat", *paths])).out == b"".join(wanted.values())


async def test_clock_and_hostname(sandbox: Sandbox) -> None:
    before = os.uname().nodename
    program = """
import os, socket, time
print(socket.gethostname())
for attempt in (lambda: socket.sethostname("evil"), lambda: time.clock_settime(time.CLOCK_REALTIME, 0)):
    try:
        attempt()
        print("changed")
    except OSError:
        pass
"""
    assert await python(sandbox, program) == "sandbox\n"
    assert os.uname().nodename == before


async def test_resource_limits(host: SandboxClient) -> None:
    sandbox = await host.start(limits=dataclasses.replace(SMALL, cpu_s=1))
    program = """
import resource
files = []
try:
    while True:
        files.append(open("/dev/null"))
except OSError:
    print(len(files) < 64)
for name in ("NPROC", "NOFILE", "FSIZE", "CPU", "CORE"):
    limit = getattr(resource, f"RLIMIT_{name}")
    try:
        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("raised", name)
    except (OSError, ValueError):
        pass
"""
    assert await python(sandbox, program) == "True\n"
    found = await sandbox.exec(["sh", "-c", "while :; do :; done"], timeout_s=60)
    assert (found.killed_by, found.rc) == ("cpu", -24)


async def test_nothing_of_ours_is_open_inside(daemon: SandboxDaemon, sandbox: Sandbox) -> None:
    """Neither in a program, nor in the first process; programs may not look into that one."""
    found = await sandbox.exec(
        ["sh", "-c", "ls /proc/self/fd | wc -l; ls /proc/1/fd /proc/1/cwd/; cat /proc/1/environ"]
    )
    assert found.text.startswith("4\n")
    assert found.text.count("Permission denied") == 3
    firsts = [each.pid for each in psutil.Process(daemon.pid).children(recursive=True) if each.name() == ".init"]
    assert [os.listdir(f"/proc/{pid}/fd") for pid in firsts] == [[]]


async def test_stopping_what_enters(host: SandboxClient) -> None:
    """A program that stops all others at every moment holds up its own sandbox, and no other one."""
    hostile, other = [await host.start(limits=SMALL) for _ in range(2)]
    base = await hostile.snapshot()
    program = """
import os, signal
if os.fork():
    os._exit(0)
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except OSError:
        pass
"""
    await hostile.exec(["/usr/bin/python3", "-c", program])
    for _ in range(25):
        entered, found = await asyncio.gather(hostile.exec(["true"], timeout_s=0.2), other.exec(["echo", "on"]))
        assert found.text == "on\n"
        assert entered.killed_by in (None, "timeout")
    await hostile.put({"answer": b"42"})
    assert (await hostile.diff(base)).paths == ("answer",)
    await hostile.kill()


async def test_trees_are_not_shared(host: SandboxClient) -> None:
    tree = await host.add_tree({"code.py": b"good\n"})
    one, two = [await host.start(tree=tree, limits=SMALL) for _ in range(2)]
    await one.exec(["sh", "-c", "echo evil > code.py; rm -rf /work/*; echo x > other"])
    assert await two.get(["code.py"]) == {"code.py": b"good\n"}
    assert await (await host.start(tree=tree, limits=SMALL)).get(["code.py"]) == {"code.py": b"good\n"}


async def test_a_sandbox_full_of_memory_can_be_judged(host: SandboxClient) -> None:
    """What an agent leaves running, or has written, must not keep its work from being read."""
    sandbox = await host.start(limits=SMALL)
    base = await sandbox.snapshot()
    await sandbox.put({"answer": b"42"})
    program = """
import os
if os.fork():
    os._exit(0)
kept = []
while True:
    try:
        kept.append(bytes(1 << 20))
        os.kill(-1, 9)
    except BaseException:
        pass
"""
    await sandbox.exec(["/usr/bin/python3", "-c", program])
    patch = await sandbox.diff(base)
    assert {entry.path: entry.after for entry in patch.entries} == {"answer": SandboxFile(b"42")}
