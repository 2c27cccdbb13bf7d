"""``python as_user.py NUMBER ARGUMENTS...``: hpcrl as another user, who need not be able to read where it is installed.

Everything that commands import is imported before root becomes that user.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import hpcrl

_ROOMS = ("cli", "config", "jobplan", "runs", "slurm", "submit", "checkpoints", "weights", "planning", "models")


def main() -> None:
    """Become the user, then run the command."""
    number, arguments = int(sys.argv[1]), sys.argv[2:]
    for name in _ROOMS:
        room = importlib.import_module(f"hpcrl.{name}")
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    for name in (
        "rich.table",
        "rich.live",
        "rich.progress",
        "submitit",
        "yaml",
        "encodings.idna",
        "encodings.utf_8_sig",
    ):
        importlib.import_module(name)
    os.setgroups([])
    os.setgid(number)
    os.setuid(number)
    sys.argv = ["hpcrl", *arguments]
    hpcrl_main = importlib.import_module("hpcrl.cli.main").main
    hpcrl_main()


if __name__ == "__main__":
    assert hpcrl.__file__
    main()
