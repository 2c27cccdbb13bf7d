"""Tries to break each limit of a sandbox on this node, and tells how it holds.

It starts a daemon of its own and one sandbox with small limits: what is reported was seen, not read from a setting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil

from hpcrl.processes.environment_marks import SANDBOX_MEMORY_VARIABLE
from hpcrl.sandboxes.client import SandboxClient, SandboxDaemon
from hpcrl.sandboxes.interface import (
    DEFAULT_WORK_DIRECTORY,
    MIB,
    ExecResult,
    Sandbox,
    SandboxError,
    SandboxEvictedError,
    SandboxLimits,
    SandboxStartError,
)

_LIMITS = SandboxLimits(
    memory_bytes=256 * MIB,
    processes=32,
    disk_bytes=16 * MIB,
    inodes=1000,
    scratch_bytes=8 * MIB,
    shm_bytes=4 * MIB,
    open_files=64,
    file_bytes=8 * MIB,
    cpu_s=1,
    output_bytes=8 * MIB,
)
_NODE_BYTES = 320 * MIB
"""Limit of all sandboxes of the daemon together; it is above that of one."""
_NODE_SANDBOXES, _NODE_TAKEN_MIB = 10, 48
_NODE_S = 20.0
"""Maximum seconds until sandboxes above that limit end, on a busy node."""
_TIMEOUT_S = 60.0
_HIDDEN = ("/root", "/home", "/run", "/sys", "/etc/shadow", "/boot")
_OWN_VARIABLES = {"PATH", "HOME", "LANG", "PWD", "OLDPWD", "SHLVL", "_"}
"""Variables that a shell in a sandbox has in any case."""

_MEMORY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        data = b"x" * (80 << 20)
        time.sleep(2)
        os.write(1, b"kept ")
        os._exit(0)
for _ in range(6):
    os.wait()
"""
_PROCESSES = """
import os, time
made = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        made += 1
except OSError:
    pass
os.write(1, str(made).encode())
os.kill(0, 9)
"""
_FILES = """
import os
made = 0
try:
    for number in range(100000):
        open(f"/work/{number}", "w").close()
        made += 1
except OSError:
    pass
print(made)
"""
_FILL = """
import os
written = 0
for number in range(64):
    try:
        with open(f"{DIRECTORY}/fill-{number}", "wb", buffering=0) as stream:
            for _ in range(64):
                written += stream.write(bytes(65536))
    except OSError:
        break
print(written)
"""
_OPEN = """
files = []
try:
    for _ in range(10000):
        files.append(open("/dev/null"))
except OSError:
    pass
print(len(files))
"""
_NETWORK = """
import socket
import sys
reached = []
for family, address in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_UNIX, NAME)):
    try:
        socket.socket(family).connect(address)
        reached.append("connected")
    except OSError:
        pass
for family in (40, 17):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        reached.append(f"family {family}")
    except OSError:
        pass
print(",".join(reached) or "nothing")
"""
_KERNEL = """
import ctypes, os
libc = ctypes.CDLL(None)
broken = []
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/mem"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        broken.append(path)
    except OSError:
        pass
if libc.unshare(0x10000000) == 0:
    broken.append("user namespace")
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    broken.append("mount")
if libc.ptrace(0, 0, 0, 0) == 0:
    broken.append("ptrace")
print(", ".join(broken) or "nothing")
"""


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """Result for one limit.

    Attributes
    ----------
    limit:
        Name of the limit.
    held:
        The attempt to break it failed.
    how:
        By what it holds; where it does not, what happened.
    """

    limit: str
    held: bool
    how: str


@dataclass(frozen=True, slots=True)
class LimitsReport:
    """Results for all limits on this node.

    Attributes
    ----------
    problem:
        Reason that no sandbox starts here; empty where one does.
    checks:
        One for each limit.
    """

    problem: str
    checks: tuple[LimitCheck, ...] = ()

    @property
    def held(self) -> bool:
        """Return whether sandboxes start here and every limit holds."""
        return not self.problem and all(check.held for check in self.checks)


async def limits_report(*, user: int | None = None, python: str = sys.executable) -> LimitsReport:
    """Start a daemon and try to break the limits of its sandboxes; takes some seconds.

    Parameters
    ----------
    user, python:
        See `hpcrl.sandboxes.client.SandboxDaemon`.
    """
    # a name of its own: sandboxes of runs on this node do not count
    variables = {SANDBOX_MEMORY_VARIABLE: f"{_NODE_BYTES}:{secrets.token_hex(16)}"}
    try:
        daemon = await asyncio.to_thread(lambda: SandboxDaemon(user=user, python=python, variables=variables))
    except SandboxStartError as error:
        return LimitsReport(str(error))
    try:
        client = await SandboxClient.connect(daemon.directory)
        try:
            return LimitsReport("", tuple([await _checked(client, name, check) for name, check in _CHECKS.items()]))
        except SandboxError as error:
            return LimitsReport(str(error))
        finally:
            await client.close()
    finally:
        await asyncio.to_thread(daemon.stop)


Check = Callable[[SandboxClient, Sandbox], Awaitable[tuple[bool, str]]]


async def _checked(client: SandboxClient, name: str, check: Check) -> LimitCheck:
    sandbox = await client.start(limits=_LIMITS)
    try:
        held, how = await check(client, sandbox)
    except SandboxError as error:
        held, how = False, f"the attempt itself failed: {error}"
    finally:
        await sandbox.kill()
    return LimitCheck(name, held, how)


async def _run(sandbox: Sandbox, program: str, *, timeout_s: float = _TIMEOUT_S) -> ExecResult:
    return await sandbox.exec(["python3", "-c", program], timeout_s=timeout_s)


async def _memory(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    found = await _run(sandbox, _MEMORY)
    how = await client.describe()
    kept = found.text.count("kept")
    if found.killed_by == "memory" and kept < 6:
        return True, f"{how['memory']}: processes were ended above {_LIMITS.memory_bytes // MIB} MiB in sum"
    return False, f"6 processes with 80 MiB each lived within {_LIMITS.memory_bytes // MIB} MiB ({how['memory']})"


async def _node_memory(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    """Let ten sandboxes take memory, each within its own limit: enough must end, and not all."""
    program = f"data = b'x' * ({_NODE_TAKEN_MIB} << 20); import time; time.sleep({_TIMEOUT_S:g})"
    room = _NODE_BYTES // (_NODE_TAKEN_MIB * MIB)
    many = [await client.start(limits=_LIMITS) for _ in range(_NODE_SANDBOXES)]
    programs = [asyncio.create_task(_run(each, program)) for each in many]
    try:
        async with asyncio.timeout(_NODE_S):
            while sum(each.done() for each in programs) < len(many) - room:
                await asyncio.sleep(0.1)
    except TimeoutError:
        pass
    kept = [each for each in programs if not each.done()]
    await asyncio.gather(*(each.kill() for each in many))
    found = await asyncio.gather(*programs, return_exceptions=True)
    ended = sum(isinstance(each, SandboxEvictedError) for each in found)
    how = (await client.describe()).get("node_memory", "no limit")
    how += f": {ended} of {len(many)} sandboxes with {_NODE_TAKEN_MIB} MiB each were ended, {len(kept)} worked on"
    return ended + len(kept) == len(many) and 0 < len(kept) <= room, how


async def _processes(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    made = _number(await _run(sandbox, _PROCESSES))
    by = (await client.describe())["processes"]
    return made <= _LIMITS.processes, f"{by}: fork was refused after {made}"


async def _inodes(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    made = _number(await _run(sandbox, _FILES))
    return made <= _LIMITS.inodes, f"nr_inodes of its tmpfs: {made} files of {_LIMITS.inodes}"


def _fill(directory: str, limit: int, by: str) -> Check:
    async def check(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
        written = _number(await _run(sandbox, f"DIRECTORY = {directory!r}\n{_FILL}"))
        return written <= limit, f"{by}: {written / MIB:.3g} MiB were written, {limit / MIB:.3g} are allowed"

    return check


async def _open_files(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    opened = _number(await _run(sandbox, _OPEN))
    return opened <= _LIMITS.open_files, f"RLIMIT_NOFILE: {opened} of {_LIMITS.open_files}"


async def _cpu(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    found = await _run(sandbox, "while True: pass", timeout_s=30)
    return found.killed_by == "cpu", f"RLIMIT_CPU, one process: killed by {found.killed_by} after {found.wall_s:.1f} s"


async def _wall(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    program = "import os, time\nif os.fork() == 0:\n os.setsid()\ntime.sleep(99)"
    found = await _run(sandbox, program, timeout_s=0.5)
    left = (await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"])).text
    held = found.killed_by == "timeout" and "time.sleep(99)" not in left
    return held, "the daemon kills the program and what it started" if held else "processes are left after a timeout"


async def _output(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    found = await sandbox.exec(["sh", "-c", "cat /dev/zero"], timeout_s=_TIMEOUT_S, max_output=1000)
    held = found.killed_by == "output" and len(found.out) == 1000
    return held, f"the daemon: killed by {found.killed_by} after {found.out_bytes / MIB:.3g} MiB"


async def _network(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    name = f"\0hpcrl-limits-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        found = await _run(sandbox, f"PORT = {tcp.getsockname()[1]}\nNAME = {name!r}\n{_NETWORK}")
    return found.text == "nothing\n", f"network namespace, seccomp: reached {found.text.strip()}"


async def _kernel(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    found = await _run(sandbox, _KERNEL)
    return found.text == "nothing\n", f"user namespace, seccomp, another user: changed {found.text.strip()}"


async def _user(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    mark = f"{secrets.randbelow(10**9) + 10**9}"
    program = asyncio.create_task(sandbox.exec(["sleep", mark], timeout_s=10))
    found: list[int] = []
    while not found and not program.done():
        await asyncio.sleep(0.05)
        found = await asyncio.to_thread(_users_of, mark)
    program.cancel()
    if not found:
        return False, "its programs are not seen from outside"
    return 0 not in found, f"programs have the user id {found[0]} on the node"


def _users_of(word: str) -> list[int]:
    users: list[int] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if word in process.cmdline():
                users += set(process.uids())
    return users


async def _secrets(client: SandboxClient, sandbox: Sandbox) -> tuple[bool, str]:
    variables = await sandbox.exec(["sh", "-c", "cat /proc/*/environ | tr '\\0' '\\n'"])
    inside = {line.partition("=")[0] for line in variables.text.split("\n")} - _OWN_VARIABLES
    listed = (await sandbox.exec(["ls", "-d", *_HIDDEN])).text.split("\n")
    seen = sorted(inside & set(os.environ)) + [path for path in _HIDDEN if path in listed]
    return not seen, f"mount namespace, empty environment: {', '.join(seen) or 'nothing'} of the node is seen"


def _number(found: ExecResult) -> int:
    text = found.text.strip()
    if not text.isdecimal():
        raise SandboxError(f"exit code {found.rc}: {text[-200:] or 'no output'}")
    return int(text)


_CHECKS: dict[str, Check] = {
    "memory in sum": _memory,
    "memory of all sandboxes": _node_memory,
    "processes": _processes,
    "bytes of the work tree": _fill(DEFAULT_WORK_DIRECTORY, _LIMITS.disk_bytes, "size of its tmpfs"),
    "bytes of /tmp": _fill("/tmp", _LIMITS.scratch_bytes, "size of its tmpfs"),
    "bytes of /dev/shm": _fill("/dev/shm", _LIMITS.shm_bytes, "size of its tmpfs"),
    "writes to /dev": _fill("/dev", 0, "read-only"),
    "writes to /": _fill("/", 0, "read-only"),
    "number of files": _inodes,
    "open files": _open_files,
    "CPU seconds": _cpu,
    "wall-clock seconds": _wall,
    "output bytes": _output,
    "network": _network,
    "kernel": _kernel,
    "user": _user,
    "files and environment of the node": _secrets,
}
