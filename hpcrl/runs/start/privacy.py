"""Who may look at a run, and that nobody else may write there: what lies in a run directory is executed and unpickled.

A run directory is its user's alone (0700), or may be read by one group (2750, its files 0640). Everything that is
written into it later takes after it (`hpcrl.ours.umask_of`).
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
from hpcrl.ours import NotOursError, check_parent
from hpcrl.runs.rundir import RunDir

__all__ = ["check_root", "protect"]

_log = logging.getLogger(__name__)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_CODE = ("submitit", "checkpoints", "plan.json", "run.json", "recipe.yaml", "cluster.yaml")
"""What is unpickled, or says what is executed."""


def check_root(root: Path) -> None:
    """See that not everybody can replace what lies in the directory of runs.

    One that does not exist is fine: it is made with the run, closed. A group may write there.

    Raises
    ------
    RunDirError
        All users of the machine may write there, and nothing (the sticky bit) keeps them from files of others.
    """
    try:
        status = root.stat()
    except OSError:
        return  # made with the run, closed
    if not status.st_mode & stat.S_IWOTH:
        return  # of a group that may write there, the site and its members answer for each other
    try:
        check_parent(root)
    except NotOursError as error:
        raise RunDirError(
            f"{error}: a run there would execute what they put in its place\n"
            f"    hint: chmod +t {root}\n    hint: another directory: --runs-root DIRECTORY (or HPCRL_RUNS_ROOT)"
        ) from error


def protect(run: RunDir, group: str | None) -> None:
    """Close a run directory to others, or open it to one group for reading. A warning says what was more open.

    Parameters
    ----------
    group:
        Who may read besides the user; None: nobody.

    Raises
    ------
    RunDirError
        It belongs to another user, or something in it does that would be executed.
    UsageError
        There is no such group, or the user is not in it.
    """
    status = run.path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RunDirError(
            f"{run.path} belongs to {_user(status.st_uid)}: nobody else goes on with this run\n"
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
    """Nobody else may write what is there; RunDirError where somebody else already did."""
    run.path.chmod(0o700)  # first: nothing can be added while we look
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
