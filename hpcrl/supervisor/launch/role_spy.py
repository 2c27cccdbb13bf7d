"""``python -m hpcrl.supervisor.launch.role_spy``: records the stacks of a role by py-spy, on the role's node.

    role_spy RUN_ID ROLE REPLICA RANK SECONDS OUTPUT

``RANK`` is ``-`` for all processes of the replica on this node. With 0 ``SECONDS`` the stacks are taken once, as text;
else the output is a trace in Chrome's format of a hundred samples a second. py-spy stops a process for each sample,
for about a millisecond.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.errors import ExitCode
from hpcrl.processes import procfs
from hpcrl.supervisor.launch.role_shell import find_role
from hpcrl.supervisor.process.stacks import dump_stacks, py_spy

_RATE = 100
_WRITE_S = 30.0
"""Seconds that py-spy may take beyond those that it records."""
_RANK = "hpcrl rank {}"
"""Name of a rank's process, which `hpcrl.trainer.launcher` sets."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Record; the exit code is 0 where that succeeded, 2 where there is no such process."""
    run_id, role, replica, rank, seconds, output = sys.argv[1:] if arguments is None else arguments
    process = find_process(run_id, role, int(replica), None if rank == "-" else int(rank))
    if process is None:
        which = f"{role} {replica}" if rank == "-" else f"rank {rank} of {role} {replica}"
        print(f"hpcrl: no Python process of {which} runs on {procfs.hostname()}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    problem = _take(process.pid, output) if seconds == "0" else _record(process.pid, int(seconds), output)
    if problem:
        print(f"hpcrl: {problem}", file=sys.stderr)
        sys.exit(ExitCode.FAILED)


def find_process(run_id: str, role: str, replica: int, rank: int | None) -> procfs.Process | None:
    """Return the first Python process of a replica on this node, or that of a rank; None if there is none."""
    root = find_role(run_id, role, replica)
    if root is None:
        return None
    # the youngest generation last: a container's starter comes before the interpreter
    processes = [root, *procfs.descendants(root.pid)]
    if rank is not None:
        return next((process for process in processes if _name(process.pid) == _RANK.format(rank)), None)
    return next((process for process in processes if _is_python(process.pid)), None)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def _take(pid: int, output: str) -> str:
    """Write the stacks of a process and of all below it; return the problem, empty if there is none."""
    found = dump_stacks(pid, output)
    problem = str(found["problem"])
    if problem:
        os.unlink(output)
    return problem


def _record(pid: int, seconds: int, output: str) -> str:
    """Write a trace of some seconds; return the problem, empty if there is none."""
    program = py_spy()
    if program is None:
        return "py-spy is not installed for this interpreter: pip install py-spy"
    temporary = f"{output}.tmp"
    command = [program, "record", "--pid", str(pid), "--subprocesses", "--duration", str(seconds)]
    command += ["--rate", str(_RATE), "--format", "chrometrace", "--output", temporary]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds + _WRITE_S,
        )
        if done.returncode == 0 and os.path.exists(temporary):
            os.replace(temporary, output)
            return ""
    except subprocess.TimeoutExpired:
        return f"py-spy did not come back within {seconds + _WRITE_S:g} s"
    finally:
        Path(temporary).unlink(missing_ok=True)
    return "\n".join(["py-spy could not record:", *(done.stderr or done.stdout).strip().splitlines()[-3:]])


if __name__ == "__main__":
    main()
