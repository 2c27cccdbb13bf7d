"""What tests of sandboxes share: daemons as root and as an ordinary user, and looks at processes of the node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import hpcrl
from hpcrl.sandboxes import Sandbox, SandboxLimits
from hpcrl.sandboxes.interface import MIB

#: an id that no account has; sandboxes of a daemon that runs as it have it, too
USER = 64999
SECRET = "sesame-7f3a"
PACKAGES = (str(Path(hpcrl.__file__).parent.parent), sysconfig.get_paths()["purelib"])
SMALL = SandboxLimits(
    memory_bytes=192 * MIB,
    processes=40,
    disk_bytes=16 * MIB,
    inodes=500,
    scratch_bytes=8 * MIB,
    shm_bytes=4 * MIB,
    open_files=64,
    file_bytes=32 * MIB,
    output_bytes=8 * MIB,
)


def skip_without_bubblewrap() -> None:
    """Skip where the node cannot run sandboxes at all."""
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here: python3 tools/bootstrap.py --slurm installs it")
    tried = subprocess.run(
        ["bwrap", "--unshare-user", "--disable-userns", "--unshare-pid", "--ro-bind", "/", "/", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        pytest.skip(f"bubblewrap cannot make namespaces here: {tried.stderr.strip()}")


def user_python() -> str:
    """Return an interpreter that an ordinary user can run: ours may lie below a private home directory."""
    for python in (sys.executable, shutil.which(f"python3.{sys.version_info[1]}", path="/usr/local/bin:/usr/bin")):
        if python is not None:
            try:
                command = [python, "-c", "import hpcrl.sandboxes.client"]
                subprocess.run(
                    command,
                    user=USER,
                    group=USER,
                    extra_groups=[],
                    check=True,
                    capture_output=True,
                    cwd="/",
                    env=paths(),
                )
            except (OSError, subprocess.CalledProcessError):
                continue
            return python
    pytest.skip("no Python of this version here that an ordinary user can run")


def paths() -> dict[str, str]:
    """Return the environment in which every interpreter finds hpcrl and what it needs."""
    return {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": os.pathsep.join(PACKAGES)}


def mark() -> str:
    """Return seconds for ``sleep`` by which a program is found among those of other tests."""
    return str(10**9 + secrets.randbelow(10**9))


async def until(condition: Callable[[], bool], *, what: str) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that have not ended; psutil compares start times, too."""
    found = []
    for process in processes:
        # one may end between two of these questions
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def boxes(daemon: psutil.Process) -> list[str]:
    """Return the names of the processes that make sandboxes of a daemon, and keep them."""
    found = []
    for each in daemon.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(each.name())
    return [name for name in found if name in ("bwrap", ".init")]


def with_argument(word: str) -> list[psutil.Process]:
    """Return processes of the node that have a word in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(word in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return living(found)


async def python(sandbox: Sandbox, program: str, *, timeout_s: float = 60.0, max_output: int = 64 << 10) -> str:
    """Run a Python program in a sandbox, and return its output; it must end well."""
    found = await sandbox.exec(["/usr/bin/python3", "-c", program], timeout_s=timeout_s, max_output=max_output)
    assert (found.rc, found.killed_by) == (0, None), found
    return found.text
