"""``python -m hpcrl.supervisor.launch.role_shell``: becomes a shell, or a command, in the environment of a role.

It runs on the role's node and takes the environment from the role's own process there, so that nothing is worked out a
second time: modules that the batch script loaded, variables of the profile, secrets. The marks of the run are left out:
a person's processes must not be ended with the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from hpcrl.errors import ExitCode
from hpcrl.processes import procfs
from hpcrl.processes.environment_marks import KIND_VARIABLE, RUN_ID_VARIABLE

_OWN = ("TERM", "COLORTERM", "LANG", "LC_ALL")
"""Variables that depend on the person's terminal."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``role_shell RUN_ID ROLE REPLICA [COMMAND ...]``; without a command, the user's login shell."""
    run_id, role, replica, *command = sys.argv[1:] if arguments is None else arguments
    process = find_role(run_id, role, int(replica))
    if process is None:
        node = os.environ.get("SLURMD_NODENAME") or procfs.hostname()
        print(f"hpcrl: no process of {role} {replica} runs on {node}", file=sys.stderr)
        print("    hint: hpcrl status says where it runs, and whether it does", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    environ = shell_environment(procfs.read_environ(process.pid), os.environ)
    try:
        os.chdir(f"/proc/{process.pid}/cwd")
        os.chdir(os.getcwd())  # by its path: the process may end before the shell does
    except OSError as error:
        print(f"hpcrl: the role's working directory cannot be entered: {error.strerror}", file=sys.stderr)
    command = command or [environ.get("SHELL") or "/bin/sh", "-i"]
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        print(f"hpcrl: {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def find_role(run_id: str, role: str, replica: int) -> procfs.Process | None:
    """Return the oldest process of a replica on this node, which its guard started; None if there is none.

    Nodes of a virtual cluster share one machine: processes of other nodes are ignored.
    """
    node = os.environ.get("SLURMD_NODENAME")
    wanted = {KIND_VARIABLE: "role", "HPCRL_ROLE": role, "HPCRL_REPLICA": str(replica)}
    if node:
        wanted["SLURMD_NODENAME"] = node
    found = [
        process
        for process in procfs.with_environ(RUN_ID_VARIABLE, run_id)
        if wanted.items() <= procfs.read_environ(process.pid).items()
    ]
    return min(found, key=lambda process: process.start_ticks, default=None)


def shell_environment(role: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the role without the marks of the run, with the terminal variables of ``own``."""
    kept = {name: value for name, value in role.items() if name not in (RUN_ID_VARIABLE, KIND_VARIABLE)}
    return {**kept, **{name: own[name] for name in _OWN if name in own}}


if __name__ == "__main__":
    main()
