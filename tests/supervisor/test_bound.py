"""A program ends with the process that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from patience import wait_for

from hpcrl.processes.die_with_parent import bound_command

STARTER = """
import subprocess, sys, time
from hpcrl.processes.die_with_parent import bound_command
child = subprocess.Popen(bound_command(["/bin/sleep", "600"]))
print(child.pid, flush=True)
time.sleep(600)
"""


def is_sleep(pid: int) -> bool:
    """Whether the process has become the program, and lives."""
    try:
        return os.readlink(f"/proc/{pid}/exe").endswith("sleep")
    except OSError:
        return False


def test_a_program_dies_with_a_killed_starter() -> None:
    starter = subprocess.Popen([sys.executable, "-P", "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    with starter, starter.stdout:
        pid = int(starter.stdout.readline())
        try:
            wait_for(lambda: is_sleep(pid), 20.0, "the program")
        finally:
            starter.kill()
        wait_for(lambda: not is_sleep(pid), 20.0, "the end of the program")


def test_a_program_of_a_dead_starter_does_not_begin() -> None:
    command = bound_command(["/bin/echo", "begun"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_the_program_has_the_pid_and_the_signals_of_what_was_started() -> None:
    with subprocess.Popen(bound_command(["/bin/sleep", "600"])) as process:
        try:
            wait_for(lambda: is_sleep(process.pid), 20.0, "the program")
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == -signal.SIGTERM
