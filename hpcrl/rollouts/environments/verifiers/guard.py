"""Runs a worker, and ends it with all that it has started.

``python -m hpcrl.rollouts.environments.verifiers.guard LIFE KEPT,KEPT DIRECTORY PROGRAM [ARGUMENT …]`` runs the program
with the open files ``KEPT``, until it ends or the other side of the pipe ``LIFE`` is closed. Orphans of the program
become children of this process: none of them outlives it, whatever session they have made. The directory is removed.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time

from hpcrl.processes.procfs import adopt_orphans, descendants, die_with_parent, send_signal

WORKER_PATH = "HPCRL_WORKER_PYTHONPATH"
"""Variable with the ``PYTHONPATH`` of the program: that of this process has hpcrl."""

_LOOK_S = 0.1
"""Seconds between two checks whether the program has ended."""
_END_S = 10.0
"""Maximum time for ending what the program has started."""


def main(life: int, kept: tuple[int, ...], directory: str, command: list[str]) -> int:
    """Run the program; returns its exit code."""
    adopt_orphans()
    os.set_inheritable(life, False)
    # the end comes by the pipe: an interrupt of the terminal is for others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", WORKER_PATH)}
    if WORKER_PATH in os.environ:
        environ["PYTHONPATH"] = os.environ[WORKER_PATH]
    try:
        program = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            pass_fds=kept,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        for fd in kept:
            os.close(fd)
        with selectors.DefaultSelector() as selector:
            selector.register(life, selectors.EVENT_READ)
            while program.poll() is None:
                if selector.select(_LOOK_S):
                    break
        _end_all()
        return program.wait()
    finally:
        _end_all()
        shutil.rmtree(directory, ignore_errors=True)


def _end_all() -> None:
    """End all processes below this one."""
    deadline = time.monotonic() + _END_S
    while (living := descendants(os.getpid())) and time.monotonic() < deadline:
        send_signal(living, signal.SIGKILL)
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), tuple(map(int, sys.argv[2].split(","))), sys.argv[3], sys.argv[4:]) & 0xFF)
