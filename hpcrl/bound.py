"""Becomes a program that ends with the process that started it: ``python -m hpcrl.bound PARENT PROGRAM [ARGUMENT …]``.

For processes with many threads, which cannot call `hpcrl.procfs.die_with_parent` between fork and exec
(``preexec_fn``): Python code that runs there waits for ever where another thread held a lock at that moment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hpcrl.interpreter import module_command
from hpcrl.procfs import die_with_parent

__all__ = ["bound_command"]


def bound_command(command: Sequence[str]) -> list[str]:
    """The command line that runs ``command``, whose first word is a path, until the thread that starts it ends."""
    return module_command(sys.executable, "hpcrl.bound", str(os.getpid()), *command)


def main(parent: str, program: str, *arguments: str) -> None:
    """Become the program."""
    die_with_parent()
    if os.getppid() != int(parent):  # it died before the line above
        sys.exit(1)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
