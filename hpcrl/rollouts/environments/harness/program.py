"""One run of a program, by a guard that ends it with this process."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.processes.thread_resources import acquire_in_thread
from hpcrl.storage.msgspec_types import decode_json

_HEADER_BYTES = 8
_MORE_S = 30.0
"""Seconds that a guard may take longer than its program."""
_SHOWN = 2000
"""Maximum number of characters that are shown of a program's errors."""


class HarnessProgramError(Exception):
    """A program failed: what it says of that comes last."""


class EndedProgram(msgspec.Struct, frozen=True):
    """A program that has ended.

    Attributes
    ----------
    code:
        Its exit code; below 0 the signal that has ended it.
    timed_out:
        It was ended at its time limit.
    stdout, stderr:
        The last of what it has written.
    error:
        Reason that it could not be started; empty where it was started.
    """

    code: int = 0
    timed_out: bool = False
    stdout: str = ""
    stderr: str = ""
    error: str = ""


async def run_program(
    command: Sequence[str],
    *,
    task: bytes,
    environ: Mapping[str, str],
    words: Mapping[str, str],
    time_limit_s: float,
    max_bytes: int,
) -> EndedProgram:
    """Run a program in an empty directory of its own, to its end. Cancelling this ends it.

    Parameters
    ----------
    task:
        Its input, on standard input and in a file.
    environ:
        All variables that it has; ``HOME`` and ``TMPDIR`` are its directory.
    words:
        Values that replace ``{name}`` in arguments, in addition to ``task`` and ``directory``.
    max_bytes:
        Maximum number of bytes that are kept of each of its output streams.

    Raises
    ------
    HarnessProgramError
        It cannot be started, or nothing is known of its end.
    """
    place = Path(await acquire_in_thread(os.rmdir, tempfile.mkdtemp, prefix="hpcrl-harness-"))
    try:
        directory = place / "work"
        await asyncio.to_thread(_prepare, place, task)
        known = {**words, "task": str(place / "task.json"), "directory": str(directory)}
        told = {
            "command": [filled(word, known) for word in command],
            "place": str(place),
            "task": known["task"],
            "directory": known["directory"],
            "environ": {**environ, "HOME": known["directory"], "TMPDIR": known["directory"]},
            "time_limit_s": time_limit_s,
            "max_bytes": max_bytes,
        }
        ended = await _guarded(told, time_limit_s + _MORE_S)
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, place, ignore_errors=True))
    return usable(ended)


def usable(ended: EndedProgram) -> EndedProgram:
    """Return a program that has ended without a failure, or at its time limit (HarnessProgramError for others)."""
    if ended.error:
        raise HarnessProgramError(f"the program cannot be started: {ended.error}")
    if ended.code and not ended.timed_out:
        how = f"exit code {ended.code}" if ended.code > 0 else f"signal {-ended.code}"
        said = ended.stderr.strip()
        # the first line is what is shown where there is room for one, and of a traceback the last one says what it is
        raise HarnessProgramError(
            f"the program ended with {how}: {said.rpartition(chr(10))[2][-_SHOWN:]}\n{said[-_SHOWN:]}"
        )
    return ended


def _prepare(place: Path, task: bytes) -> None:
    (place / "work").mkdir()
    (place / "task.json").write_bytes(task)


def filled(word: str, known: Mapping[str, str]) -> str:
    """Return a word of the command with what its names stand for; other braces stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], found[0]), word)


async def _guarded(told: Mapping[str, Any], limit_s: float) -> EndedProgram:
    ours, theirs = socket.socketpair()
    try:
        guard = await asyncio.shield(asyncio.to_thread(_start_guard, theirs))
    except BaseException:
        ours.close()
        raise
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        data = msgspec.json.encode(told)
        writer.write(len(data).to_bytes(_HEADER_BYTES, "big") + data)
        async with asyncio.timeout(limit_s):
            length = int.from_bytes(await reader.readexactly(_HEADER_BYTES), "big")
            ended: EndedProgram = decode_json(await reader.readexactly(length), EndedProgram)
        return ended
    except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
        raise HarnessProgramError(f"the end of the program is unknown: {type(error).__name__}") from error
    finally:
        # the guard sees the end of the connection, ends what there is, and then itself
        writer.close()
        await asyncio.shield(asyncio.to_thread(_wait_for, guard))


def _start_guard(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start the guard at its end of a connection, which is its own from then on."""
    with theirs:
        return subprocess.Popen(
            module_command(sys.executable, "hpcrl.rollouts.environments.harness.guard", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=with_safe_path({name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}),
            pass_fds=(theirs.fileno(),),
            # a signal to this process's group must not keep the guard from ending the program
            start_new_session=True,
        )


def _wait_for(guard: subprocess.Popen[bytes]) -> None:
    try:
        guard.wait(_MORE_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()
