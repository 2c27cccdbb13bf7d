"""``python as_user.py NUMBER ARGUMENTS...``: hpcrl as another user, who need not be able to read where it is installed.

Everything that commands import is imported before root becomes that user, who gets a copy of what they read.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import shutil
import sys
from pathlib import Path

import hpcrl
from hpcrl.config import resources

_ROOMS = ("cli", "config", "jobplan", "runs", "slurm", "submit", "checkpoints", "weights", "planning", "models")


def main() -> None:
    """Become the user, then run the command."""
    number, arguments = int(sys.argv[1]), sys.argv[2:]
    for name in (*(f"hpcrl.{room}" for room in _ROOMS), "typer", "rich", "yaml"):
        room = importlib.import_module(name)
        for module in pkgutil.walk_packages(room.__path__, f"{name}.", onerror=_leave_out):
            # modules of others may be for other systems, or for packages that are not installed
            if not module.name.endswith("__main__"):
                with contextlib.suppress(*(() if name.startswith("hpcrl.") else (Exception,))):
                    importlib.import_module(module.name)
    for name in ("submitit", "encodings.idna", "encodings.utf_8_sig"):
        importlib.import_module(name)
    _copy_data(number)
    os.setgroups([])
    os.setgid(number)
    os.setuid(number)
    sys.argv = ["hpcrl", *arguments]
    hpcrl_main = importlib.import_module("hpcrl.cli.main").main
    hpcrl_main()


def _leave_out(name: str) -> None:
    """Go on without the package of others that cannot be imported."""
    assert not name.startswith("hpcrl."), name


def _copy_data(number: int) -> None:
    """Give the user profiles, recipes and templates that he may read."""
    copies = Path.cwd() / ".hpcrl-data"
    if not copies.exists():
        for kind in ("clusters", "recipes", "templates"):
            shutil.copytree(resources.package_data(kind), copies / kind)
        for path in (copies, *copies.rglob("*")):
            os.chown(path, number, number)
    resources.__file__ = str(copies / "hpcrl/config/resources.py")


if __name__ == "__main__":
    assert hpcrl.__file__
    main()
