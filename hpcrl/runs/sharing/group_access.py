"""Open a run to a group for reading, and close it again. The token and the files of secrets stay closed."""

from __future__ import annotations

import errno
import grp
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.errors import RunDirError, UsageError
from hpcrl.network.credentials import TOKEN_FILE
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.secret_scan import SecretFinding, SecretScan
from hpcrl.storage.files import atomic_write

_SHARED = "shared.json"
_UNSCANNED = frozenset({"weights", "checkpoints", "start-model"})
"""Directories of tensors."""
_PAYLOAD = ("rollouts", "payload")
_NO_ACL = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOENT)
"""Errors that say that there is no list."""
_CLOSED = frozenset({TOKEN_FILE, "submitit"})
"""Entries of a run that stay its user's alone: the token, and pickles that the user's jobs execute."""


class _Shared(msgspec.Struct, frozen=True):
    group: str


class GroupOpened(NamedTuple):
    """Entries that were changed, and whether new ones of a running attempt are readable, too (default ACL)."""

    entries: int
    inherits: bool


def shared_group(run: RunDir) -> str | None:
    """Return the group to which its user has opened a run; None where it was not."""
    try:
        return msgspec.json.decode((run.path / _SHARED).read_bytes(), type=_Shared).group
    except (OSError, msgspec.DecodeError):
        return None


def find_leaks(run: RunDir) -> Iterator[SecretFinding]:
    """Yield the secrets in files of a run that a group could read."""
    scan = SecretScan.of_run(run)
    for path, status in _entries(run):
        parts = path.relative_to(run.path).parts
        if stat.S_ISREG(status.st_mode) and parts[0] not in _UNSCANNED and parts[:2] != _PAYLOAD:
            try:
                yield from scan.file(path)
            except FileNotFoundError:
                continue


def open_to_group(run: RunDir, group: str) -> GroupOpened:
    """Let a group read a run: directories 2750, files 0640, and a default ACL for what is written later.

    Raises
    ------
    UsageError
        The group does not exist, or the user may not give files to it.
    RunDirError
        The run belongs to another user.
    """
    gid = _gid(group)
    _check_owner(run)
    # first, so that an attempt that begins meanwhile does not close it again
    atomic_write(run.path / _SHARED, msgspec.json.encode(_Shared(group)))
    entries = 0
    try:
        for path, status in [(run.path, run.path.lstat()), *_entries(run)]:
            entries += _set(path, status, gid, opened=True)
    except PermissionError as error:
        raise UsageError(
            f"you may not give {error.filename} to the group {group!r}\n    hint: one of `id -Gn`"
        ) from error
    return GroupOpened(entries, _default_acl(run.path, ["-m", f"d:g:{gid}:rX,d:o::-"]))


def close_to_group(run: RunDir) -> int:
    """Close a run to all others again, and return the number of entries that were changed (RunDirError as above)."""
    _check_owner(run)
    (run.path / _SHARED).unlink(missing_ok=True)
    _default_acl(run.path, ["-b"])
    found = [*_entries(run, closed=True), (run.path, run.path.lstat())]
    for path, status in found:
        # this machine may lack the program of the one that has opened it
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            _remove_acl(path)
    return sum(_set(path, status, status.st_gid, opened=False) for path, status in found)


def _entries(run: RunDir, *, closed: bool = False) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the entries of a run that a group may read; with ``closed`` all."""
    for folder, directories, files in os.walk(run.path):
        if Path(folder) == run.path and not closed:
            directories[:] = [name for name in directories if name not in _CLOSED]
            files = [name for name in files if name not in _CLOSED]  # noqa: PLW2901 - those that are left
        for name in (*directories, *files):
            path = Path(folder, name)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode):
                yield path, status


def _set(path: Path, status: os.stat_result, gid: int, *, opened: bool) -> int:
    """Change group and mode of an entry; return 1 where that changed anything."""
    mode, directory = stat.S_IMODE(status.st_mode), stat.S_ISDIR(status.st_mode)
    if status.st_uid != os.geteuid():
        return 0  # another user owns it
    wanted = mode & 0o700
    if opened:
        wanted |= (0o2050 if directory else 0o040) | (0o010 if mode & 0o100 and not directory else 0)
    if mode == wanted and (not opened or status.st_gid == gid):
        return 0
    try:
        if opened and status.st_gid != gid:
            os.chown(path, -1, gid, follow_symlinks=False)
        path.chmod(wanted)
    except FileNotFoundError:
        return 0
    return 1


def _default_acl(path: Path, change: list[str]) -> bool:
    """Change the access lists of all directories of a run; False where the filesystem or the machine has none."""
    setfacl = shutil.which("setfacl")
    if setfacl is None:
        return False
    directories = [str(path), *(str(entry) for entry in path.rglob("*") if entry.is_dir() and not entry.is_symlink())]
    closed = {str(path / name) for name in _CLOSED}
    kept = [each for each in directories if not any(each == c or each.startswith(f"{c}/") for c in closed)]
    command = [setfacl, *change, "--", *kept]
    return subprocess.run(command, capture_output=True, check=False, env={"LC_ALL": "C"}).returncode == 0


def _remove_acl(directory: Path) -> None:
    """Remove the access lists of a directory, which files that are made in it later would inherit."""
    for name in ("system.posix_acl_default", "system.posix_acl_access"):
        try:
            os.removexattr(directory, name, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_ACL:
                raise


def _gid(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(f"there is no group {group!r}\n    hint: one of `id -Gn`") from None


def _check_owner(run: RunDir) -> None:
    if run.path.lstat().st_uid != os.geteuid():
        raise RunDirError(f"{run.path} belongs to another user: only its owner can open or close it")
