"""Stacks of a role's processes by py-spy, taken by the guard on the role's own node.

Standard library only, as the guard is. py-spy reads another process's memory, which the kernel allows to root, or
where ``kernel.yama.ptrace_scope`` is 0; if it may not, the file says so, with the state from ``/proc``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpcrl.processes import procfs

_LIMIT_S = 20.0
"""Timeout in seconds for all processes together."""
_AT_ONCE = 16
_MOST = 256
_STOPPED = "Tt"
_FRAMES = 6


def dump_stacks(root: int, path: str) -> dict[str, object]:
    """Write the stacks of ``root`` and everything below it to a file.

    Returns
    -------
    dict
        ``path``; ``frames``: the top frames of the process that tells most; ``stopped``: pids that are stopped by a
        signal; ``problem``: why stacks are missing, or empty.
    """
    own = procfs.read_process(root)
    processes = [*([own] if own is not None else []), *procfs.descendants(root)][:_MOST]
    deadline = time.monotonic() + _LIMIT_S
    texts: dict[int, str] = {}
    program = py_spy()
    for start in range(0, len(processes), _AT_ONCE):
        texts |= _py_spy_dump(program, processes[start : start + _AT_ONCE], deadline)
    with open(path, "w") as stream:
        for process in processes:
            stream.write(f"=== {_describe(process)}\n{texts[process.pid].rstrip()}\n\n")
    good = [p for p in processes if texts[p.pid].startswith("Process ")]
    problems = [texts[p.pid].strip().splitlines()[-1] for p in processes if p not in good and texts[p.pid].strip()]
    # ranks and engines are below their launchers: the youngest tells most; one that is stopped, more than that
    teller = max(good, key=lambda p: (p.state in _STOPPED, p.start_ticks), default=None)
    return {
        "path": path,
        "frames": [] if teller is None else top_frames(texts[teller.pid]),
        "stopped": [p.pid for p in processes if p.state in _STOPPED],
        "problem": "" if good else (problems or ["no process of the role is left"])[0],
    }


def top_frames(text: str) -> list[str]:
    """Return the first frames of a running thread in py-spy's output, else of the main thread."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            threads.append([line.strip()])
        elif threads and line.strip():
            threads[-1].append(line.strip())
    if not threads:
        return []
    chosen = max(threads, key=lambda t: ("(active" in t[0] and len(t) > 1, "MainThread" in t[0]))
    return chosen[: _FRAMES + 1]


def py_spy() -> str | None:
    """Return the path of py-spy; None where it is not installed for this interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _py_spy_dump(program: str | None, processes: Sequence[procfs.Process], deadline: float) -> dict[int, str]:
    if program is None:
        return {p.pid: "py-spy is not installed for this interpreter: pip install py-spy" for p in processes}
    running = {}
    for process in processes:
        # pausing a process that a signal has already stopped would never return
        how = ["--nonblocking"] if process.state in _STOPPED else []
        running[process.pid] = subprocess.Popen(
            [program, "dump", *how, "--pid", str(process.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    texts = {}
    for pid, child in running.items():
        try:
            texts[pid] = child.communicate(timeout=max(0.5, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            texts[pid] = "py-spy did not come back in time"
    return texts


def _describe(process: procfs.Process) -> str:
    words = f"pid {process.pid}, parent {process.ppid}, state {process.state}, {process.threads} threads"
    with contextlib.suppress(OSError):
        words += f", waits in {Path(f'/proc/{process.pid}/wchan').read_text() or 'nothing'}"
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")
        words += f": {os.fsdecode(command)[:200]}"
    return words
