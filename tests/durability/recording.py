"""Runs a program under the recorder (recorder.c) and reads what it changed in a directory, in order.

The recorded program may say where it is: ``mark(("committed", 3))`` stands between the operations that it made before
and after. It also says where in the code each fsync was asked for (`name_sync_sites`).
"""

from __future__ import annotations

import ctypes
import enum
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
_HEAD = struct.Struct("=IIQqIIQ")
_SITE = "site "


class Kind(enum.IntEnum):
    """What was done; the numbers are those of recorder.c."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    EXTEND = 4
    SYNC = 5
    CLOSE = 6
    RENAME = 7
    UNLINK = 8
    MKDIR = 9
    RMDIR = 10
    LINK = 11
    SYMLINK = 12
    MARK = 13
    MAP = 14


class Operation(NamedTuple):
    """One change, in the order in which it had its effect.

    Attributes
    ----------
    kind, pid, inode:
        What, by which process, to which inode (0 where only names matter).
    offset:
        Of a write, its first byte; of a truncation or extension, the size; of a creation, 0 where the file was
        emptied and -1 else.
    first, second:
        Paths; of a mark, its text.
    data:
        What was written.
    site:
        Of a sync, where in the code it was asked for.
    """

    kind: Kind
    pid: int
    inode: int
    offset: int
    first: str
    second: str
    data: bytes
    site: str = ""


Recordings = Callable[[str], tuple[Sequence[Operation], Path]]
"""Gives what a scenario did, and the directory that it left."""


def build_recorder(directory: Path) -> Path:
    """Compile the library; skips the test, and says so, where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("DURABILITY IS NOT TESTED: there is no C compiler (hint: apt-get install gcc libc6-dev)")
    library = directory / "recorder.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, HERE / "recorder.c", "-ldl"]
    subprocess.run([*command, "-lpthread"], check=True)
    return library


def record(library: Path, scenario: str, work: Path) -> list[Operation]:
    """Run ``durable_scenarios.<scenario>(root, other)`` as a program and return what it did below ``root``.

    Parameters
    ----------
    work:
        An empty directory: ``root`` and what is not recorded lie in it.
    """
    root, log = work / "root", work / "log"
    root.mkdir(parents=True)
    tests = HERE.parent
    parts = (HERE, tests, tests / "checkpoints", tests / "runs", tests.parent)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "HPCRL_RECORD_ROOT": str(root),
        "HPCRL_RECORD_LOG": str(log),
        "PYTHONPATH": ":".join(map(str, parts)),
    }
    command = [sys.executable, str(HERE / "durable_scenarios.py"), scenario, str(root), str(work / "other")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{scenario}\n{done.stdout}\n{done.stderr}"
    return list(_read(log.read_bytes(), str(root)))


def _read(data: bytes, root: str) -> Iterator[Operation]:
    at, site = 0, ""
    while at < len(data):
        kind, pid, inode, offset, first, second, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        texts = [data[at : at + first].decode(), data[at + first : at + first + second].decode()]
        at += first + second
        operation = Operation(Kind(kind), pid, inode, offset, *texts, data[at : at + size])
        at += size
        if operation.kind is Kind.MARK and operation.first.startswith(_SITE):
            site = operation.first.removeprefix(_SITE)
            continue
        if operation.kind is Kind.SYNC:
            operation, site = operation._replace(site=site), ""
        elif operation.kind is not Kind.MARK:
            operation = operation._replace(
                first=operation.first.replace(root, "", 1), second=operation.second.replace(root, "", 1)
            )
        yield operation


# -- in the recorded program


def mark(what: Any) -> None:
    """Say something (encodable as JSON) at this place of the recording; nothing where nobody records."""
    _mark(json.dumps(what))


def _mark(text: str) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "hpcrl_record_mark"):
        library.hpcrl_record_mark(text.encode())


def name_sync_sites() -> None:
    """From now on each ``os.fsync`` of this process says first where it was asked for and of what."""
    real: Callable[[int], None] = os.fsync

    def fsync(fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        name = Path(os.readlink(f"/proc/self/fd/{number}")).name
        # numbers, nonces and temporary names are not part of a site
        name = re.sub(r"^\.(.*)\.[0-9a-f]{32}\.tmp$", r"\1", name)
        name = re.sub(r"^(\.writer|\.staging)-.*$", r"\1", name)
        name = re.sub(r"\d+", "#", name)
        _mark(f"{_SITE}{_caller(sys._getframe(1))}: {name}")
        real(fd)

    os.fsync = fsync


def _caller(frame: FrameType | None) -> str:
    """The first function below `hpcrl.storage.files` that asked for it, as ``fence.commit``."""
    names = []
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("hpcrl.", "torch.")):
            name = module.removeprefix("hpcrl.")
            names.append(f"{name}.{frame.f_code.co_name}")
            if module != "hpcrl.storage.files":
                break
        elif names:
            break
        frame = frame.f_back
    return names[-1] if names and not names[-1].startswith("storage.files.") else "elsewhere"
