"""Access rights of a run directory: only its user may write there, because its files are executed and unpickled.

A run directory is accessible to its user alone (0700), or readable by one group (2750, its files 0640). Files that are
written into it later get the same rights (`hpcrl.storage.trusted_paths.umask_of`).
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import pwd
import stat
from pathlib import Path

from hpcrl.errors import RunDirError, UsageError
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.trusted_paths import NotOursError, check_parent

_log = logging.getLogger(__name__)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_CODE = ("submitit", "checkpoints", "plan.json", "run.json", "recipe.yaml", "cluster.yaml")
"""Paths that are unpickled, or that decide what is executed."""


def check_root(root: Path) -> None:
    """Raise RunDirError where all users may replace files in the directory of runs.

    A missing directory is accepted: it is created with the run and closed to others. A group may write there.

    Raises
    ------
    RunDirError
        All users of the machine may write there, and nothing (the sticky bit) keeps them from files of others.
    """
    try:
        status = root.stat()
    except OSError:
        return  # created with the run and closed to others
    if not status.st_mode & stat.S_IWOTH:
        return  # a group that may write there is trusted: that is the site's decision
    try:
        check_parent(root)
    except NotOursError as error:
        raise RunDirError(
            f"{error}: a run there would execute what they put in its place\n"
            f"    hint: chmod +t {root}\n    hint: another directory: --runs-root DIRECTORY (or HPCRL_RUNS_ROOT)"
        ) from error


def protect(run: RunDir, group: str | None) -> None:
    """Close a run directory to other users, or open it to one group for reading; warn about what was more open.

    Parameters
    ----------
    group:
        Group that may read besides the user; None: no other user may.

    Raises
    ------
    RunDirError
        It belongs to another user, or contains an executed file that does.
    UsageError
        The group does not exist, or the user is not in it.
    """
    status = run.path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RunDirError(
            f"{run.path} belongs to {_user(status.st_uid)}: only its owner can resume it\n"
            "    hint: submit a run of your own"
        )
    if status.st_mode & _OTHERS_WRITE:
        _take_back(run)
        _log.warning("%s was writable by others (mode %o); it no longer is", run.path, stat.S_IMODE(status.st_mode))
    elif group is None and status.st_mode & 0o077:
        _log.warning("%s could be read by others; it no longer can (files.group opens runs to a group)", run.path)
    mode, gid = (0o700, status.st_gid) if group is None else (0o2750, _gid(group))
    if status.st_gid != gid:
        try:
            os.chown(run.path, -1, gid)
        except PermissionError as error:
            raise UsageError(
                f"files.group: you may not give files to the group {group!r}\n    hint: a group that you are in"
            ) from error
    if stat.S_IMODE(run.path.lstat().st_mode) != mode:
        run.path.chmod(mode)


def _take_back(run: RunDir) -> None:
    """Remove write permissions of other users from existing files.

    Raises
    ------
    RunDirError
        A file of another user is in a place from which files are executed.
    """
    run.path.chmod(0o700)  # first, so that nothing can be added during the walk
    for directory, directories, files in os.walk(run.path):
        for name in (*directories, *files):
            path = Path(directory, name)
            status = path.lstat()
            if status.st_uid != os.geteuid():
                if path.relative_to(run.path).parts[0] in _CODE:
                    raise RunDirError(
                        f"{path} belongs to {_user(status.st_uid)}, and would be executed as you\n"
                        f"    hint: look at it, and remove it where it is not yours"
                    )
            elif status.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(status.st_mode):
                path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)


def _gid(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(
            f"files.group: there is no group {group!r}\n    hint: one of `id -Gn`, or none: files: {{group: null}}"
        ) from None


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"the user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"
