"""Bundles: one file with all wheels of environments, for sites without a network.

A bundle is a tar file. Its first member is `MANIFEST_NAME`, which has the digest of every other one: a wheel in
``wheels/``, and for each role a file of requirements with digests for people who install by hand.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

import msgspec

from hpcrl.errors import UsageError
from hpcrl.sites.installation.environment import EnvironmentContents, check_room
from hpcrl.sites.installation.installers import InstallFailedError, pip_command, run_installer
from hpcrl.sites.installation.locks import Lock, LockedPackage, canonical_name, parse_lock
from hpcrl.sites.installation.own_wheel import own_wheel
from hpcrl.sites.installation.roles import Accelerator, SiteRole, imports_of, lock_name
from hpcrl.sites.installation.staging import Stage
from hpcrl.storage import lost_replies
from hpcrl.storage.files import decode_versioned

MANIFEST_NAME = "hpcrl-bundle.json"
_FORMAT_VERSION = 1
_MAX_MANIFEST_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 20
_MEMBER = re.compile(r"wheels/[A-Za-z0-9][\w.+-]*\.whl|[a-z]+\.txt", re.ASCII)
_WHEEL = re.compile(r"(?P<name>[\w.]+)-(?P<version>[\w.!]+)(?:\+[\w.]+)?(?:-\d\w*)?-[\w.]+-[\w.]+-[\w.]+\.whl")
_GLIBC = 34
"""Minor version of the newest glibc 2 that wheels may ask for, as in ``tools/lock_sites.py``."""
_DAMAGED = "copy it again, and compare the digest that `hpcrl site bundle` printed (sha256sum)"


class BundledFile(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a bundle: its name, size in bytes, and SHA-256 (hexadecimal)."""

    name: str
    bytes: int
    sha256: str


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a bundle, and its platform.

    Attributes
    ----------
    hpcrl:
        Version of hpcrl.
    accelerator, python, machine:
        Platform of its wheels: ``cuda`` or ``cpu``, for example ``3.11``, and ``x86_64``.
    roles:
        The environments that can be installed from it.
    files:
        All other members.
    """

    format_version: int
    hpcrl: str
    accelerator: str
    python: str
    machine: str
    roles: list[str]
    files: list[BundledFile]


def write_bundle(
    output: Path,
    locks: dict[SiteRole, Lock],
    accelerator: Accelerator,
    python: str,
    machine: str,
    *,
    say: Callable[[str], None],
) -> str:
    """Collect all wheels of some environments into one file; return its SHA-256 (hexadecimal).

    The next call reuses the files of an interrupted one.

    Parameters
    ----------
    output:
        The file; must not exist.
    locks:
        The lock of each role.
    python, machine:
        Platform of the wheels; may differ from this machine's.

    Raises
    ------
    UsageError
        The file exists, or a lock is not for this platform.
    InstallFailedError
        A wheel cannot be had.
    """
    if output.exists():
        raise UsageError(f"{output} exists already\n    hint: choose another name, or move it away")
    packages = {role: lock.packages_for(python, machine) for role, lock in locks.items()}
    place = output.with_name(f".{output.name}.collected")
    try:
        (place / "wheels").mkdir(parents=True, exist_ok=True)
        (place / "tmp").mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{output.parent}: {error.strerror}\n    hint: name a file in a directory of yours") from error
    everything = sorted({package for each in packages.values() for package in each}, key=lambda p: (p.name, p.version))
    say(f"collecting {len(everything)} wheels for Python {python} on {machine}")
    _download(place, everything, python, machine)
    wheel = own_wheel(place / "wheels")
    by_name = _wheels_by_name(place / "wheels")
    members: dict[str, Path | bytes] = {}
    for role, needed in packages.items():
        lines = []
        for package in needed:
            path = by_name.get((package.name, package.version))
            if path is None:
                raise InstallFailedError(f"no wheel of {package.name} {package.version} was collected; call this again")
            members[f"wheels/{path.name}"] = path
            lines.append(f"{package.name}=={package.version} --hash=sha256:{_digest(path)}\n")
        lines.append(f"hpcrl=={wheel.name.split('-')[1]} --hash=sha256:{_digest(wheel)}\n")
        members[f"{role}.txt"] = "".join(lines).encode()
    members[f"wheels/{wheel.name}"] = wheel
    manifest = BundleManifest(
        format_version=_FORMAT_VERSION,
        hpcrl=wheel.name.split("-")[1],
        accelerator=str(accelerator),
        python=python,
        machine=machine,
        roles=[str(role) for role in packages],
        files=[_described(name, content) for name, content in sorted(members.items())],
    )
    say("writing the bundle")
    digest = _write_tar(output, {MANIFEST_NAME: msgspec.json.encode(manifest), **dict(sorted(members.items()))})
    shutil.rmtree(place, ignore_errors=True)
    return digest


def read_bundle(path: Path) -> BundleManifest:
    """Read the manifest of a bundle (UsageError: it is none, or damaged)."""
    with _opened(path) as archive:
        member = archive.next()
        stream = None if member is None else archive.extractfile(member)
        if member is None or stream is None or member.name != MANIFEST_NAME or member.size > _MAX_MANIFEST_BYTES:
            raise UsageError(f"{path} is not a bundle of hpcrl\n    hint: `hpcrl site bundle` makes one")
        try:
            manifest = decode_versioned(stream.read(), BundleManifest, _FORMAT_VERSION)
        except ValueError as error:
            raise UsageError(f"the manifest of {path} cannot be read: {error}\n    hint: {_DAMAGED}") from error
    if strange := [file.name for file in manifest.files if not _MEMBER.fullmatch(file.name)]:
        raise UsageError(f"{path} lists {strange[0]!r}, which no bundle has\n    hint: {_DAMAGED}")
    return manifest


def unpack_role(path: Path, manifest: BundleManifest, role: SiteRole, stage: Stage) -> EnvironmentContents:
    """Check every byte of a bundle, and put the wheels of a role into the stage.

    Raises
    ------
    UsageError
        The bundle lacks this role, is truncated or damaged, or the filesystem is full.
    """
    if role not in manifest.roles:
        raise UsageError(
            f"{path} has environments for {', '.join(manifest.roles)}, and not for {role}\n"
            f"    hint: make a bundle with `--role {role}`"
        )
    lists = _check_all(path, manifest)
    lines = lists[f"{role}.txt"].decode().splitlines()
    digests = {line.split("--hash=sha256:")[1] for line in lines}
    needed = [file for file in manifest.files if file.sha256 in digests]
    own = f"wheels/hpcrl-{manifest.hpcrl}-py3-none-any.whl"
    size = sum(file.bytes for file in needed)
    room = EnvironmentContents(str(role), (), stage.wheels / "none", (), size)
    check_room(stage.root, room)
    with _opened(path) as archive:
        wanted = {file.name for file in needed} | {own}
        for member in archive:
            if member.name in wanted:
                _copy(archive, member, stage.wheels / Path(member.name).name)
    wheel = stage.wheels / Path(own).name
    lock = _lock_inside(wheel, lock_name(role, Accelerator(manifest.accelerator)), path)
    found = {key: _digest(each) for key, each in _wheels_by_name(stage.wheels).items()}
    packages = []
    for package in lock.packages_for(manifest.python, manifest.machine):
        digest = found.get((package.name, package.version))
        if digest is None or (package.digests and digest not in package.digests):
            raise UsageError(f"{path} lacks the {package.name} {package.version} of its own list\n    hint: {_DAMAGED}")
        packages.append(replace(package, digests=(digest,)))
    return EnvironmentContents(lock.name, tuple(packages), wheel, imports_of(role), size, stage.wheels)


def _download(place: Path, packages: Sequence[LockedPackage], version: str, machine: str) -> None:
    """Download wheels for a platform, each with one of its digests where the lock has some."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(_GLIBC, 4, -1)]
    platforms += [f"manylinux{name}_{machine}" for name in ("2014", "2010", "1")] + [f"linux_{machine}"]
    number = version.replace(".", "")
    target = ["--python-version", version, "--implementation", "cp", "--only-binary", ":all:", "--no-deps"]
    target += [word for abi in (f"cp{number}", "abi3", "none") for word in ("--abi", abi)]
    target += [word for platform in platforms for word in ("--platform", platform)]
    for hashed in (True, False):
        lines = [f"{package.requirement()}\n" for package in packages if bool(package.digests) is hashed]
        if not lines:
            continue
        requirements = place / "requirements.txt"
        requirements.write_text("".join(lines), encoding="utf-8")
        words = [
            *pip_command(),
            "download",
            "--quiet",
            "--no-input",
            "--disable-pip-version-check",
            *target,
        ]
        words += ["--require-hashes"] if hashed else []
        words += ["--dest", str(place / "wheels"), "-r", str(requirements)]
        run_installer(words, scratch=place / "tmp")


def _wheels_by_name(directory: Path) -> dict[tuple[str, str], Path]:
    """Give wheels by the name of their distribution and their version, without a local version."""
    found = {}
    for path in sorted(directory.glob("*.whl")):
        if match := _WHEEL.fullmatch(path.name):
            found[canonical_name(match["name"]), match["version"]] = path
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _described(name: str, content: Path | bytes) -> BundledFile:
    if isinstance(content, bytes):
        return BundledFile(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    return BundledFile(name=name, bytes=content.stat().st_size, sha256=_digest(content))


class _Hashing:
    """Writes to a stream and computes its digest."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.digest = stream, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._stream.write(data)


def _write_tar(output: Path, members: dict[str, Path | bytes]) -> str:
    """Write a tar file under its name at once; return its digest."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as stream:
            hashing = _Hashing(stream)
            with tarfile.open(fileobj=cast(IO[bytes], hashing), mode="w|", format=tarfile.PAX_FORMAT) as archive:
                for name, content in members.items():
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content) if isinstance(content, bytes) else content.stat().st_size
                    if isinstance(content, bytes):
                        archive.addfile(entry, io.BytesIO(content))
                    else:
                        with content.open("rb") as source:
                            archive.addfile(entry, source)
            stream.flush()
            os.fsync(stream.fileno())
        lost_replies.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return hashing.digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a bundle; what is wrong with its form is a UsageError, also while it is read."""
    try:
        with tarfile.open(path, mode="r:") as archive:
            yield archive
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist\n    hint: name the file that `hpcrl site bundle` made") from error
    except (tarfile.TarError, EOFError) as error:
        raise UsageError(f"{path} is truncated or damaged: {error}\n    hint: {_DAMAGED}") from error


def _check_all(path: Path, manifest: BundleManifest) -> dict[str, bytes]:
    """Compare each member with its digest; return the lists of requirements (UsageError where one differs)."""
    expected, lists = {file.name: file for file in manifest.files}, {}
    with _opened(path) as archive:
        for member in archive:
            if member.name == MANIFEST_NAME:
                continue
            file, stream = expected.pop(member.name, None), archive.extractfile(member)
            if file is None or stream is None:
                raise UsageError(f"{path} has a {member.name!r} that it does not list\n    hint: {_DAMAGED}")
            if member.name.endswith(".txt"):
                lists[member.name] = stream.read()
                digest = hashlib.sha256(lists[member.name])
            else:
                digest = hashlib.sha256()
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
            if member.size != file.bytes or digest.hexdigest() != file.sha256:
                raise UsageError(f"{member.name} in {path} is damaged: its digest is another\n    hint: {_DAMAGED}")
    if expected:
        raise UsageError(f"{path} is truncated: {next(iter(expected))} is missing\n    hint: {_DAMAGED}")
    return lists


def _copy(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    stream = archive.extractfile(member)
    assert stream is not None
    with target.open("wb") as copy:
        shutil.copyfileobj(stream, copy, _BLOCK_BYTES)


def _lock_inside(wheel: Path, name: str, bundle: Path) -> Lock:
    """Read a lock from hpcrl's wheel in a bundle."""
    import zipfile  # noqa: PLC0415

    inner = f"hpcrl/_data/locks/{name}.txt"
    try:
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(inner).decode()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"hpcrl's wheel in {bundle} has no {inner}: {error}\n    hint: {_DAMAGED}") from error
    return parse_lock(name, text, f"{inner} in {bundle}")
