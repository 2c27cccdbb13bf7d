"""The programs that a virtual cluster needs, and where to get them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hpcrl.errors import UsageError

_BASE = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "slurmstepd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "unshare": "util-linux",
}
_ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb-admin": "mariadb-client",
}
_STALE = {"bindfs": "bindfs", "fusermount3": "fuse3"}
_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Daemons lie in sbin, which a user's PATH may not have."""


def find_program(name: str) -> str | None:
    """Return the path of a program; None where it is not installed."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SEARCH}")


def require_program(name: str) -> str:
    """Return the path of a program that `check_machine` has found."""
    path = find_program(name)
    assert path is not None, f"{name} is not installed"
    return path


def missing_programs(*, accounting: bool = False, stale: bool = False) -> dict[str, str]:
    """Return the programs that are not installed, with the Debian package of each."""
    wanted = _BASE | (_ACCOUNTING if accounting else {}) | (_STALE if stale else {})
    return {name: package for name, package in wanted.items() if find_program(name) is None}


def check_machine(*, accounting: bool, stale: bool) -> None:
    """Raise `UsageError` with a hint where this machine cannot run such a cluster."""
    if missing := missing_programs(accounting=accounting, stale=stale):
        packages = " ".join(dict.fromkeys(missing.values()))
        raise UsageError(
            f"a virtual cluster needs programs that are not installed: {', '.join(missing)}\n"
            f"    hint: sudo apt-get install {packages}"
        )
    if stale and os.geteuid() != 0:
        raise UsageError(
            "--stale-s mounts filesystems, which needs root\n    hint: run it as root, or without --stale-s"
        )
    if stale and not Path("/dev/fuse").exists():
        raise UsageError("--stale-s needs /dev/fuse, which this machine (or container) does not have")
