"""Making an environment of a site: whole and verified under its name, or not there at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.errors import UsageError
from hpcrl.sites.installation.installers import Installer, InstallFailedError, run_installer
from hpcrl.sites.installation.interpreters import Interpreter
from hpcrl.sites.installation.locks import LockedPackage, canonical_name
from hpcrl.sites.installation.own_wheel import code_digest
from hpcrl.sites.installation.staging import Stage, give_final_name, make_prefix, staged
from hpcrl.storage.disk_space import find_shortage
from hpcrl.storage.files import decode_versioned, write_json

MANIFEST = "hpcrl-environment.json"
"""File at the top of an environment that says what it was made from."""
_FORMAT_VERSION = 1
_UNPACKED = 2.6
"""Bytes of an environment in addition to its wheels, a byte of wheels: unpacked files, and compiled modules."""
_FILES_PER_PACKAGE = 400
_IMPORT_TIMEOUT_S = 900.0
_VERIFY = """
import importlib, importlib.metadata, json, sys
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
print("\\n" + json.dumps([failed, found]))
"""


class EnvironmentManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of an environment: two with equal fields are interchangeable.

    Attributes
    ----------
    name:
        Name of the lock, for example ``trainer-cuda``.
    python, machine:
        For example ``3.11`` and ``x86_64``.
    packages:
        Digest of the versions of all packages.
    code:
        Digest of hpcrl's own code.
    """

    format_version: int
    hpcrl: str
    name: str
    python: str
    machine: str
    packages: str
    code: str


@dataclass(frozen=True, slots=True)
class EnvironmentContents:
    """Contents of an environment.

    Attributes
    ----------
    name:
        Name of the lock.
    packages:
        All packages of this platform.
    wheel:
        hpcrl's own wheel.
    imports:
        Modules that it must be able to import.
    wheel_bytes:
        Sum of the wheels' sizes.
    wheels:
        Directory with all wheels, for an installation without a network; None to use the indexes of the user.
    """

    name: str
    packages: tuple[LockedPackage, ...]
    wheel: Path
    imports: tuple[str, ...]
    wheel_bytes: int
    wheels: Path | None = None

    def manifest(self, interpreter: Interpreter) -> EnvironmentManifest:
        """Return what an environment of this will say of itself."""
        import hashlib  # noqa: PLC0415

        lines = "\n".join(f"{package.name}=={package.version}" for package in self.packages)
        return EnvironmentManifest(
            format_version=_FORMAT_VERSION,
            hpcrl=self.wheel.name.split("-")[1],
            name=self.name,
            python=interpreter.version,
            machine=interpreter.machine,
            packages=hashlib.sha256(lines.encode()).hexdigest(),
            code=code_digest(self.wheel),
        )


class InstalledEnvironment(NamedTuple):
    """An environment, and whether this call made it."""

    path: Path
    was_made: bool

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")


def find_installed(target: Path, wanted: EnvironmentManifest) -> bool:
    """Return whether an environment is there already, made from the same.

    Raises
    ------
    UsageError
        Something else has the name: an environment of other versions, or no environment of hpcrl.
    """
    if not os.path.lexists(target):
        return False
    try:
        found = decode_versioned((target / MANIFEST).read_bytes(), EnvironmentManifest, _FORMAT_VERSION)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{target} exists and was not made by `hpcrl site install`: {error}\n    hint: name another --prefix"
        ) from error
    differ = [key for key in msgspec.structs.asdict(wanted) if getattr(found, key) != getattr(wanted, key)]
    if differ:
        what = ", ".join("hpcrl's code" if key == "code" else key for key in differ)
        raise UsageError(
            f"{target} exists, and was made from other inputs ({what} differ)\n"
            "    hint: runs may use it, so it is never replaced: name another --prefix, one for each version"
        )
    return True


def install(
    prefix: Path,
    role: str,
    interpreter: Interpreter,
    installer: Installer,
    contents: Callable[[Stage], EnvironmentContents],
    *,
    say: Callable[[str], None],
) -> InstalledEnvironment:
    """Make the environment ``prefix/role``, unless it exists.

    Parameters
    ----------
    contents:
        Gives what goes into it, with its files in the stage.
    say:
        Takes one line of progress at a time.

    Raises
    ------
    UsageError
        Another process makes it now, its name is taken, or the filesystem is full.
    InstallFailedError
        The installer failed, or what was installed does not import. Nothing is left.
    """
    make_prefix(prefix)
    target = prefix / role
    with staged(prefix, role) as stage:
        what = contents(stage)
        manifest = what.manifest(interpreter)
        if find_installed(target, manifest):
            _check_runs(target)
            return InstalledEnvironment(target, False)
        check_room(prefix, what)
        _fill(stage, interpreter, installer, what, say)
        say("importing what it needs")
        verify(stage.environment, what)
        _compile(stage, target)
        write_json(stage.environment / MANIFEST, manifest)
        (stage.environment / MANIFEST).chmod(0o644)
        try:
            give_final_name(stage, target)
        except FileExistsError:
            # on a filesystem without locks another installation may finish first
            return InstalledEnvironment(target, not find_installed(target, manifest))
    return InstalledEnvironment(target, True)


def check_room(prefix: Path, contents: EnvironmentContents) -> None:
    """Raise UsageError where a filesystem has no room for an environment."""
    size = int(contents.wheel_bytes * (_UNPACKED + (contents.wheels is None)))
    if short := find_shortage(prefix, size=size, files=_FILES_PER_PACKAGE * len(contents.packages)):
        raise UsageError(f"no room for the environment: {short}\n    hint: make room there, or name another --prefix")


def _fill(
    stage: Stage,
    interpreter: Interpreter,
    installer: Installer,
    contents: EnvironmentContents,
    say: Callable[[str], None],
) -> None:
    """Make the environment in the stage and install into it."""
    run = _Run(stage, offline=contents.wheels is not None)
    say(f"making an environment with {interpreter.path}")
    run([interpreter.path, "-I", "-m", "venv", "--without-pip", str(stage.environment)])
    python = stage.environment / "bin" / "python"
    for hashed in (True, False):
        packages = [package for package in contents.packages if bool(package.digests) is hashed]
        if not packages:
            continue
        if not hashed:
            names = ", ".join(f"{package.name} {package.version}" for package in packages)
            say(f"hpcrl ships no digest for: {names} (builds for CPUs are on indexes of their own)")
        say(f"installing {len(packages)} packages with {installer.name}")
        requirements = stage.root / "requirements.txt"
        requirements.write_text("".join(f"{package.requirement()}\n" for package in packages), encoding="utf-8")
        run(installer.words(python, requirements, wheels=contents.wheels, hashed=hashed))
    # kept in the environment: bundles, other environments and `pip install` of extras read it there
    kept = stage.environment / "share" / "hpcrl" / contents.wheel.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(contents.wheel.read_bytes())
    for path, mode in ((kept.parent.parent, 0o755), (kept.parent, 0o755), (kept, 0o644)):
        path.chmod(mode)  # independent of the umask
    requirements = stage.root / "hpcrl.txt"
    requirements.write_text(f"hpcrl=={contents.wheel.name.split('-')[1]}\n", encoding="utf-8")
    say("installing hpcrl")
    run(installer.words(python, requirements, wheels=kept.parent, hashed=False))
    (stage.environment / ".lock").unlink(missing_ok=True)  # uv's, which all users could write


class _Run:
    """Runs programs in a stage, with its lock and its place for temporary files."""

    def __init__(self, stage: Stage, *, offline: bool) -> None:
        self._stage, self._offline = stage, offline

    def __call__(self, words: Sequence[str]) -> None:
        run_installer(words, scratch=self._stage.scratch, offline=self._offline, pass_fds=self._stage.descriptors)


def verify(environment: Path, contents: EnvironmentContents) -> None:
    """Import what an environment needs, in its own interpreter, and compare versions of packages with the lock.

    Raises
    ------
    InstallFailedError
        Something is missing, of another version, or does not import.
    """
    python = str(environment / "bin" / "python")
    try:
        done = subprocess.run(
            [python, "-I", "-B", "-c", _VERIFY, *contents.imports],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_IMPORT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        failed, found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise InstallFailedError(
            f"imports took longer than {_IMPORT_TIMEOUT_S:g} s; the environment was not made\n"
            "    hint: name a faster filesystem with --prefix"
        ) from None
    except (ValueError, IndexError):
        words = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1][:300]
        raise InstallFailedError(
            f"the interpreter ended while it imported {', '.join(contents.imports)}: {words}\n"
            "    hint: the wheels may need a newer system or another processor: use a container (docs/install.md)"
        ) from None
    versions = {canonical_name(name): version.partition("+")[0] for name, version in found.items()}
    for package in contents.packages:
        if (has := versions.get(package.name)) != package.version:
            raise InstallFailedError(
                f"{package.name} is {has or 'missing'} and not {package.version}; the environment was not made\n"
                "    hint: call this again; where it stays so, the index serves other files"
            )
    if failed:
        lines = "".join(f"\n    import {name}: {str(words)[:300]}" for name, words in failed.items())
        raise InstallFailedError(f"the environment does not work, and was not made{lines}\n    hint: {_hint(failed)}")


def _hint(failed: dict[str, str]) -> str:
    words = " ".join(failed.values())
    if "libcuda.so" in words:
        return "the driver of a GPU is needed for that: call this on a node with GPUs (srun), with the same --prefix"
    if "torch" in failed:
        return (
            "on a machine without CUDA say `--accelerator cpu`, and point pip at a build of torch for CPUs "
            "(PIP_FIND_LINKS, or PIP_EXTRA_INDEX_URL)"
        )
    return "a library of the system is missing, or --accelerator is not that of this site"


def _compile(stage: Stage, target: Path) -> None:
    """Compile all modules once: hundreds of ranks would do it at the same time, or may not write there.

    A user who has asked Python to write no compiled modules gets none.
    """
    if sys.dont_write_bytecode:
        return
    site = [*stage.environment.glob("lib/python*/site-packages")]
    python = str(stage.environment / "bin" / "python")
    # compiled modules record the final names of their sources; a file that does not compile is not for this Python
    words = [python, "-I", "-m", "compileall", "-q", "-j", "0", "-s", str(stage.environment), "-p", str(target)]
    subprocess.run([*words, *map(str, site)], check=False, capture_output=True, umask=0o022)


def _check_runs(environment: Path) -> None:
    """Raise UsageError where the interpreter of an environment does not run any more."""
    python = environment / "bin" / "python"
    try:
        done = subprocess.run([python, "-I", "-c", "import hpcrl"], check=False, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{python} does not run: {error}\n    hint: remove {environment} and install it again"
        ) from error
    if done.returncode:
        raise UsageError(f"{python} cannot import hpcrl\n    hint: remove {environment} and install it again")
