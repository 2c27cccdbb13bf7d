"""Becomes a program that ends with the process that started it: ``python -m hpcrl.processes.die_with_parent PARENT
PROGRAM [ARGUMENT …]``.

For processes with many threads, which cannot call `hpcrl.processes.procfs.die_with_parent` between fork and exec
(``preexec_fn``): Python code that runs there deadlocks if another thread held a lock at that moment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hpcrl.processes.interpreter import module_command
from hpcrl.processes.procfs import die_with_parent


def bound_command(command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` until the thread that starts it ends.

    The first word of ``command`` is a path.
    """
    return module_command(sys.executable, "hpcrl.processes.die_with_parent", str(os.getpid()), *command)


def main(parent: str, program: str, *arguments: str) -> None:
    """Replace this process by the program."""
    die_with_parent()
    if os.getppid() != int(parent):  # it died before the line above
        sys.exit(1)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
