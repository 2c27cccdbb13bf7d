"""The interpreter that an environment is made of: what it is, asked from itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import UsageError

_TIMEOUT_S = 60.0
_OLDEST = (3, 11)
_OLDEST_GLIBC = (2, 34)
"""Minimum version of glibc for the wheels in ``locks/``; see ``tools/lock_sites.py``."""
_QUESTION = """
import json, platform, sys, importlib.util as util
print(json.dumps([list(sys.version_info[:3]), sys.implementation.name, sys.platform, platform.machine(),
    list(platform.libc_ver()), sys.executable, sys.base_prefix, util.find_spec("venv") is not None]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that hpcrl can be installed for.

    Attributes
    ----------
    path:
        Its executable, absolute.
    version:
        Major and minor number, for example ``3.11``.
    machine:
        For example ``x86_64``.
    """

    path: str
    version: str
    machine: str


def own_interpreter() -> str:
    """Return the Python that the running environment was made of: a new one does not depend on this one."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def ask_interpreter(python: str) -> Interpreter:
    """Ask a Python what it is.

    Parameters
    ----------
    python:
        A path, or a name on ``PATH``.

    Raises
    ------
    UsageError
        It does not run, is too old, or no wheels are shipped for its platform.
    """
    hint = "name another interpreter with --python"
    try:
        done = subprocess.run(
            [python, "-I", "-c", _QUESTION],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python} cannot be run: {error}\n    hint: {hint}") from error
    try:
        version, implementation, system, machine, libc, executable, _, has_venv = json.loads(done.stdout)
        version, libc_name, libc_version = tuple(map(int, version)), str(libc[0]), str(libc[1])
    except (ValueError, TypeError, IndexError):
        words = (done.stderr.strip() or "no answer").splitlines()[-1][:200]
        raise UsageError(f"{python} is not a Python of version 3: {words}\n    hint: {hint}") from None
    if version < _OLDEST:
        found = ".".join(map(str, version))
        raise UsageError(f"hpcrl needs Python 3.11 or newer, and {python} is {found}\n    hint: {hint}")
    if implementation != "cpython":
        raise UsageError(f"{python} is {implementation}, and the shipped wheels are for CPython\n    hint: {hint}")
    _check_system(python, str(system), libc_name, libc_version)
    if not has_venv:
        raise UsageError(f"{python} has no module venv\n    hint: install it (Debian: python3-venv), or {hint}")
    return Interpreter(str(Path(executable)), f"{version[0]}.{version[1]}", str(machine))


def _check_system(python: str, system: str, libc: str, libc_version: str) -> None:
    """Raise UsageError where the shipped wheels do not run."""
    hint = "use a container with a newer system (docs/install.md)"
    if system != "linux":
        raise UsageError(
            f"{python} runs on {system}, and environments of a site are for Linux\n"
            "    hint: run this on a login node; a bundle can be made on any Linux machine with a network"
        )
    numbers = [int(part) for part in libc_version.split(".")[:2] if part.isdecimal()]
    if libc != "glibc" or tuple(numbers) < _OLDEST_GLIBC:
        found = f"{libc} {libc_version}".strip() or "another C library"
        raise UsageError(f"the shipped wheels need glibc 2.34 or newer, and {python} runs on {found}\n    hint: {hint}")
