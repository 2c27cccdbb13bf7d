"""The programs that install wheels: uv where it is on the path, else pip. Their failures in words of hpcrl."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.processes.interpreter import module_command
from hpcrl.storage.disk_space import describe_space

_DROPPED = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIRE_VIRTUALENV", "PIP_PYTHON", "PIP_REQUIRE_HASHES"),
    *("PIP_REPORT", "PIP_DRY_RUN", "PIP_NO_DEPS", "PIP_EDITABLE", "UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET"),
)
"""Variables of the caller that would install elsewhere or something else; indexes, mirrors and caches stay theirs."""
_PIP_IS_PLAIN = ("--no-compile", "--disable-pip-version-check", "--no-warn-script-location")
_LAST_LINES = 12
_FAILURES = (
    (
        r"No space left on device|Disk quota exceeded|os error 28\b|os error 122\b",
        "there is no room left for the environment",
        "make room, or name another --prefix; downloads are kept in PIP_CACHE_DIR or UV_CACHE_DIR, too",
    ),
    (
        r"DO NOT MATCH THE HASHES|Hash mismatch",
        "a wheel does not have the digest that hpcrl ships for it",
        "the index or a proxy serves other files: ask its owner; for a bundle, copy it again",
    ),
    (
        r"NewConnectionError|Failed to establish a new connection|Temporary failure in name resolution|"
        r"Name or service not known|Network is unreachable|Connection refused|ProxyError|ConnectTimeoutError|"
        r"dns error|tcp connect error|error sending request|Connection reset|timed out|SSLError|CERTIFICATE_VERIFY",
        "no package index answers",
        "without a network here, make a bundle on a machine that has it (`hpcrl site bundle -o FILE.tar`) and install "
        "it with `--bundle FILE.tar`; a mirror of the site is named by PIP_INDEX_URL or UV_INDEX_URL",
    ),
    (
        r"No matching distribution found|no wheels with a matching|No solution found|has no usable wheels",
        "a package is unavailable in the version that hpcrl pins",
        "no index answers, or it is not a full mirror of PyPI, or has no wheel for this platform; `hpcrl site bundle` "
        "makes a file for machines without a network",
    ),
)


class InstallFailedError(HpcrlError):
    """An environment could not be made; nothing of it is left."""


@dataclass(frozen=True, slots=True)
class Installer:
    """A program that installs wheels into an environment.

    Attributes
    ----------
    name:
        ``uv`` or ``pip``.
    command:
        Its words up to the subcommand ``install``, without the interpreter of the environment.
    """

    name: str
    command: tuple[str, ...]

    def words(self, python: Path, requirements: Path, *, wheels: Path | None, hashed: bool) -> list[str]:
        """Return the command that installs exactly what a file of requirements lists.

        Parameters
        ----------
        python:
            The interpreter of the environment.
        requirements:
            File with a ``name==version`` or the path of a wheel a line, and digests where ``hashed``.
        wheels:
            Directory that has all of them: nothing is asked from a network. None for the indexes of the user.
        hashed:
            Whether each line must have a digest.
        """
        with_uv = self.name == "uv"
        target = ["--python", str(python)]
        words = [*self.command, "install", *target] if with_uv else [*self.command, *target, "install", "--no-input"]
        words += ["--no-deps", "--only-binary", ":all:"]
        words += ["--quiet", *([] if with_uv else _PIP_IS_PLAIN)]
        words += ["--require-hashes"] if hashed else []
        if wheels is not None:
            words += ["--no-index", "--find-links", str(wheels), *(["--offline", "--no-config"] if with_uv else [])]
        return [*words, "-r", str(requirements)]


def find_installer() -> Installer:
    """Return uv where it is on the path, else pip (UsageError: there is neither)."""
    if uv := shutil.which("uv"):
        return Installer("uv", (uv, "pip"))
    return Installer("pip", pip_command())


def pip_command() -> tuple[str, ...]:
    """Return the command that runs pip (UsageError: this interpreter has none)."""
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"{sys.executable} has no pip, and uv is not on the path\n"
            "    hint: python3 -m ensurepip, or install uv and put it on PATH"
        )
    return tuple(module_command(sys.executable, "pip"))


def run_installer(
    words: Sequence[str],
    *,
    scratch: Path,
    offline: bool = False,
    pass_fds: Sequence[int] = (),
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run pip, uv or venv to its end.

    Parameters
    ----------
    scratch:
        Directory for temporary files: wheels of several GB do not fit into ``/tmp`` of many login nodes.
    offline:
        Ignore configuration and variables of pip, which may name indexes.
    pass_fds:
        Descriptors that the program inherits, so that a lock is held as long as it lives.
    environ:
        Variables in place of those of this process.

    Raises
    ------
    InstallFailedError
        It failed; says why in words where the reason is known, and quotes its last lines.
    """
    env = {key: value for key, value in (environ or os.environ).items() if key not in _DROPPED}
    if offline:
        env = {key: value for key, value in env.items() if not key.startswith(("PIP_", "UV_"))}
        env["PIP_CONFIG_FILE"] = os.devnull
    # uv would share files of its cache with environments: a change in one would change all
    env = {"UV_LINK_MODE": "copy", **env, "TMPDIR": str(scratch)}
    done = subprocess.run(
        words,
        env=env,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=tuple(pass_fds),
        # all users of a site read it, whatever the umask of the installing user is
        umask=0o022,
    )
    if done.returncode:
        raise InstallFailedError(_explained(words, done.stdout, done.returncode, scratch))


def _explained(words: Sequence[str], output: str, code: int, scratch: Path) -> str:
    """Return a message for a failure of an installer."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    said = "".join(f"\n    {line[:300]}" for line in lines)
    for pattern, what, hint in _FAILURES:
        if re.search(pattern, output, re.IGNORECASE):
            room = f" ({describe_space(scratch)})" if what.startswith("there is no room") else ""
            return f"{what}{room}; the environment was not made{said}\n    hint: {hint}"
    program = Path(words[0]).name
    return (
        f"{program} failed with exit code {code}; the environment was not made{said}\n"
        "    hint: its output is above; the same command can be called again"
    )
