"""Whether a directory or a file is ours alone to change: owner, mode and links, looked at before it is believed.

Where everybody may make names (``/dev/shm``, ``/tmp``, a shared scratch disk), somebody else may have made ours first.
All of these raise `NotOursError`, an `OSError`, with what is wrong and with whom.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "CLOSED_UMASK",
    "NotOursError",
    "check_parent",
    "check_private",
    "check_tree",
    "files_as",
    "make_private",
    "open_ours",
    "read_secret",
    "umask_of",
]

CLOSED_UMASK = 0o077
"""Nobody else may look."""

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_SECRET_BYTES = 1 << 16
_OVERFLOW_UID = 65534
"""Owner of what belongs to nobody of this user namespace: root's, in a container without root."""


class NotOursError(PermissionError):
    """Others made it, or may change it."""


def make_private(path: Path) -> None:
    """Make a directory that nobody else may enter, or see that the one that is there is one (its parent exists).

    OSError where it cannot be made, NotOursError where the one that is there is others' to change.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_private(path)


def check_private(path: Path) -> None:
    """See that a path is a directory, no link, is ours, and that nobody else may write in it.

    Raises
    ------
    NotOursError
        It is not so; says who could change what.
    OSError
        It cannot be looked at, or is not there.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotOursError(f"{path} is {'a link' if stat.S_ISLNK(status.st_mode) else 'no directory'}")
    _check(path, status)


def check_parent(path: Path) -> None:
    """See that nobody else can rename or replace what is ours in a directory, which may be root's (``/tmp``).

    Raises
    ------
    NotOursError
        It is another user's, or others may write there and no sticky bit protects what is ours.
    OSError
        It cannot be looked at, or is not there.
    """
    status = path.stat()
    if status.st_uid not in (0, os.geteuid(), _OVERFLOW_UID):
        raise NotOursError(f"{path} belongs to user {status.st_uid}, who can replace whatever lies in it")
    if status.st_mode & _WRITABLE and not status.st_mode & stat.S_ISVTX:
        raise NotOursError(f"{path} is writable by others and has no sticky bit: they can replace whatever lies in it")


def check_tree(path: Path) -> None:
    """See that a directory and everything below it is ours, and that nobody else may write any of it.

    What is unpickled runs as whoever reads it: ask this first.

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
    """The umask with which what is written into a directory is as open as it is: to its group, or to nobody."""
    try:
        opened = os.stat(directory).st_mode & stat.S_IRGRP
    except OSError:
        opened = 0
    return 0o027 if opened else CLOSED_UMASK


@contextmanager
def files_as(directory: Path | str) -> Iterator[None]:
    """Inside, files and directories are made with `umask_of` a directory. For all threads of the process."""
    previous = os.umask(umask_of(directory))
    try:
        yield
    finally:
        os.umask(previous)


def open_ours(path: Path | str) -> int:
    """Open a regular file for reading that is ours, that nobody else may write, and that is no link of any kind.

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
        raise NotOursError(f"{path} cannot be opened as a file of ours: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotOursError(f"{path} is no regular file")
        if status.st_nlink > 1:
            raise NotOursError(f"{path} has other names")
        _check(path, status)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_secret(path: Path) -> str:
    """The text of a file that is ours and that nobody else may read, without the line break at its end.

    Raises
    ------
    OSError
        It is not so (`NotOursError`), or there is no text in it. What is in it is not in the message.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotOursError(f"{path} is no regular file")
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
