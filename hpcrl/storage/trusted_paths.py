"""Checks that only this user can change a directory or a file: owner, mode and links, before it is trusted.

Other users may create names in shared directories (``/dev/shm``, ``/tmp``, a shared scratch disk) before hpcrl does.
All of these functions raise `NotOursError`, an `OSError`, with the problem and the other user.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLOSED_UMASK = 0o077
"""Umask that excludes all other users."""
SCRATCH_PREFIX = "hpcrl-"
"""Beginning of the name of a run's directory on a node; those of its replicas are in it."""

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_SECRET_BYTES = 1 << 16
_OVERFLOW_UID = 65534
"""Owner of files of users outside of this user namespace: root's, in a container without root."""


class NotOursError(PermissionError):
    """Others made it, or may change it."""


def make_private(path: Path) -> None:
    """Make a directory that no other user may enter, or check that an existing one is such (its parent exists).

    OSError where it cannot be made, NotOursError where the one that is there is others' to change.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_private(path)


def check_private(path: Path) -> None:
    """Check that a path is a directory (not a link) of this user in which no other user may write.

    Raises
    ------
    NotOursError
        It is not; the message names who could change what.
    OSError
        It cannot be inspected, or does not exist.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotOursError(f"{path} is {'a link' if stat.S_ISLNK(status.st_mode) else 'not a directory'}")
    _check(path, status)


def check_parent(path: Path) -> None:
    """Check that no other user can rename or replace this user's entries of a directory, such as root's ``/tmp``.

    Raises
    ------
    NotOursError
        It is another user's, or others may write there and no sticky bit protects this user's entries.
    OSError
        It cannot be inspected, or does not exist.
    """
    status = path.stat()
    if status.st_uid not in (0, os.geteuid(), _OVERFLOW_UID):
        raise NotOursError(f"{path} belongs to user {status.st_uid}, who can replace its files")
    if status.st_mode & _WRITABLE and not status.st_mode & stat.S_ISVTX:
        raise NotOursError(f"{path} is writable by others and has no sticky bit: they can replace its files")


def check_tree(path: Path) -> None:
    """Check that this user owns a directory and everything below it, and that no other user may write there.

    Unpickled data can run code as the reading user: call this first.

    Raises
    ------
    NotOursError
        Something in it is not.
    """
    check_private(path)
    for directory, directories, files in os.walk(path):
        for name in directories:
            check_private(Path(directory, name))
        for name in files:
            file = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):  # a temporary one
                _check(file, file.lstat())


def umask_of(directory: Path | str) -> int:
    """Return the umask for files in a directory: readable by the group if the directory is, else private."""
    try:
        opened = os.stat(directory).st_mode & stat.S_IRGRP
    except OSError:
        opened = 0
    return 0o027 if opened else CLOSED_UMASK


@contextmanager
def files_as(directory: Path | str) -> Iterator[None]:
    """Set the process's umask to `umask_of` a directory within the context, for all its threads."""
    previous = os.umask(umask_of(directory))
    try:
        yield
    finally:
        os.umask(previous)


def open_trusted(path: Path | str) -> int:
    """Open for reading a regular file that this user owns, that no other user may write, and that is not a link.

    Raises
    ------
    FileNotFoundError
        It is not there.
    NotOursError
        It is not such a file, or cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotOursError(f"{path} cannot be opened as a file of this user: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotOursError(f"{path} is not a regular file")
        if status.st_nlink > 1:
            raise NotOursError(f"{path} has other names")
        _check(path, status)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_secret(path: Path) -> str:
    """Return the text of a file that this user owns and only this user can read, without its trailing line break.

    Raises
    ------
    OSError
        The file is not owned or not private (`NotOursError`), or has no text. The message never contains its content.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotOursError(f"{path} is not a regular file")
        if status.st_uid != os.geteuid():
            raise NotOursError(f"{path} belongs to user {status.st_uid}, we are {os.geteuid()}")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise NotOursError(f"others may read or write {path} (mode {stat.S_IMODE(status.st_mode):o}, not 600)")
        data = stream.read(_SECRET_BYTES + 1)
    text = data.decode("utf-8", "replace").rstrip("\r\n")
    if not text or len(data) > _SECRET_BYTES or "\0" in text:
        raise OSError(f"{path} has no text of at most {_SECRET_BYTES} bytes for a variable")
    return text


def _check(path: Path | str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise NotOursError(f"{path} belongs to user {status.st_uid}, we are {os.geteuid()}")
    if status.st_mode & _WRITABLE and not stat.S_ISLNK(status.st_mode):
        raise NotOursError(f"{path} is writable by others (mode {stat.S_IMODE(status.st_mode):o})")
