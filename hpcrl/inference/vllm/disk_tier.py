"""``python -m hpcrl.inference.vllm.disk_tier … -- COMMAND``: an engine whose KV overflows from host memory to a disk.

vLLM writes a file a block and never removes one. This makes a directory in the role's temporary one, which goes with
the role, puts its path into COMMAND, starts a process that removes the oldest files where they are too many, and
becomes COMMAND. A block that is gone is computed again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpcrl.processes.interpreter import module_command

_LOW = 0.9
"""Share of the limit down to which files are removed."""
_LOOK_S = 10.0


def trim(root: Path, limit_bytes: int) -> int:
    """Remove the oldest files below ``root`` where they have more than ``limit_bytes``; the bytes that are left.

    By the time of writing: most disks are mounted so that reading leaves no trace.
    """
    found: list[tuple[float, int, str]] = []
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            try:
                status = os.stat(path)
            except FileNotFoundError:  # it got its final name
                continue
            found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    if total <= limit_bytes:
        return total
    for _, size, path in sorted(found):
        if total <= _LOW * limit_bytes:
            break
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        total -= size
    return total


def _keep_trimmed(root: Path, limit_bytes: int, look_s: float, engine: int) -> None:
    """Trim the directory periodically, as long as the engine runs."""
    while os.getppid() == engine:
        try:
            trim(root, limit_bytes)
        except OSError as error:  # a failing disk is reported by the engine; trimming continues once it works again
            print(f"{root} cannot be trimmed: {error}", file=sys.stderr, flush=True)
        time.sleep(look_s)


def main() -> None:
    """Make the directory, start the other process, become the engine."""
    parser = argparse.ArgumentParser(prog="hpcrl.inference.vllm.disk_tier")
    parser.add_argument("--limit-bytes", type=int, required=True, help="maximum bytes of this node's blocks")
    parser.add_argument("--look-s", type=float, default=_LOOK_S)
    parser.add_argument("--place", help="text in COMMAND that is replaced by the directory")
    parser.add_argument("--trim", type=Path, help="remove old files of this directory, in place of starting COMMAND")
    parser.add_argument("--engine", type=int, help="process ID of the parent, with whose end --trim ends")
    parser.add_argument("command", nargs="*")
    settings = parser.parse_args()
    if settings.trim is not None:
        _keep_trimmed(settings.trim, settings.limit_bytes, settings.look_s, settings.engine)
        return
    root = Path(tempfile.mkdtemp(prefix="kv-"))
    own = ["--trim", str(root), "--engine", str(os.getpid()), "--look-s", str(settings.look_s)]
    own += ["--limit-bytes", str(settings.limit_bytes)]
    subprocess.Popen(module_command(sys.executable, "hpcrl.inference.vllm.disk_tier", *own))
    command = [word.replace(settings.place, str(root)) for word in settings.command]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
