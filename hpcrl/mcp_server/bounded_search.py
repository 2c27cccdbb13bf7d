"""Searches of logs that end: an expression of an agent can take hours for one line, and no thread can be stopped."""

from __future__ import annotations

import os
import subprocess
import sys

from hpcrl.errors import UsageError
from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.runs.rundir import RunDir

LONGEST_S = 60.0
"""Maximum time of a search."""


def search_lines(
    run: RunDir, expression: str, *, role: str = "", since: str = "", lines: int, longest_s: float = LONGEST_S
) -> list[str]:
    """Return the newest lines that match as JSON, as ``hpcrl logs --json`` prints them, from a process of its own.

    Raises
    ------
    UsageError
        The command refuses, or has not ended in time.
    """
    options = {"role": role, "since": since, "grep": expression}
    # as one word each: an expression may begin with a dash
    given = [f"--{name}={value}" for name, value in options.items() if value]
    command = module_command(sys.executable, "hpcrl", "logs", "--json", f"--lines={lines}", *given, "--", str(run.path))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,  # ours has the requests of the agent
            timeout=longest_s,
            env=with_safe_path(os.environ),
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"the search did not end within {longest_s:g} s and was stopped\n"
            "    hint: search for a word, or give role or since"
        ) from None
    if done.returncode:
        raise UsageError(done.stderr.strip().removeprefix("hpcrl: ") or "the logs cannot be read")
    return done.stdout.splitlines()
