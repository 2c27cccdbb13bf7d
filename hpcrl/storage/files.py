"""Files that are whole or absent: atomic writes, staged directories, content hashes.

Everything here works on NFS: one temporary name in the same directory, ``fsync`` of the file, ``rename``,
``fsync`` of the directory. No ``flock``, no inotify.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcrl.storage import lost_replies
from hpcrl.storage.msgspec_types import decode_json

_T = TypeVar("_T")
_STAGING_PREFIX = ".staging-"
_REMOVED_PREFIX = ".removed-"


class FileRecord(msgspec.Struct, frozen=True):
    """Size and content hash of a file in a manifest.

    Attributes
    ----------
    bytes:
        Length of the file.
    xxh3_128:
        XXH3-128 of the content, hexadecimal. It detects torn and mixed files; it does not protect against a
        forger.
    """

    bytes: int
    xxh3_128: str


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory, with its parents, unless it is there. On return its name survives a power failure.

    That holds also if another process has just made it: files in a directory are worth no more than its own name.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in (path, *made):
        fsync_dir(directory.parent)


def atomic_write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace ``path`` by ``data``: a reader sees the old content or the new one, never a part.

    Parameters
    ----------
    durable:
        On return it survives a power failure. What ends with its writer's life need not.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        lost_replies.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)  # a write or a sync does not say of which file
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_dir(path.parent)


def atomic_create(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Make ``path`` with this content, where it does not exist (FileExistsError): of several, one succeeds."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        lost_replies.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a file to write that gets the name ``path`` at the end, and is removed where that is not reached.

    Raises
    ------
    FileExistsError
        Something of the name was made meanwhile; it stays as it is.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        lost_replies.link(part, path)
    finally:
        part.unlink(missing_ok=True)


def open_log(path: Path) -> int:
    """Open a file of lines for appending; returns the descriptor. There is one writer at a time.

    A power failure may have left a part of the last line, or zeros: that gets an end, so that only it is lost.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size > 0 and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
    except OSError:
        os.close(fd)
        raise
    return fd


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON (anything msgspec can encode) with `atomic_write`."""
    atomic_write(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


class _FormatOnly(msgspec.Struct):
    format_version: int


def decode_versioned(text: bytes, kind: type[_T], format_version: int) -> _T:
    """Decode JSON that names its own format.

    Raises
    ------
    ValueError
        It is of another format, torn, or lacks something.
    """
    try:
        # the format is checked first: another one may lack or rename fields
        found = decode_json(text, _FormatOnly).format_version
        if found != format_version:
            raise ValueError(f"it has format {found}, this hpcrl reads {format_version}")
        value: _T = decode_json(text, kind)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    return value


class StagedDirectory:
    """A directory that is built under a hidden name and appears under its own name at once.

    Every rank of a writer may add files to `path`; one of them calls `commit`.
    """

    def __init__(self, target: Path, *, token: str) -> None:
        """Prepare a staging name.

        Parameters
        ----------
        target:
            The final name; must not exist at `commit`.
        token:
            Names this writer (all of its ranks use the same), for example ``attempt-0002``.
        """
        self.target = target
        self.path = target.with_name(f"{_STAGING_PREFIX}{target.name}-{token}")

    def create(self) -> None:
        """Make an empty staging directory; what an earlier failure of this writer left is removed."""
        shutil.rmtree(self.path, ignore_errors=True)
        make_directory(self.path.parent)
        lost_replies.make_own_directory(self.path)

    def commit(self) -> None:
        """Give the directory its name. All files must have been fsynced by their writers.

        Raises
        ------
        FileExistsError
            The target exists; nothing was changed.
        """
        for directory, _, _ in os.walk(self.path):
            fsync_dir(Path(directory))
        if self.target.exists():
            raise FileExistsError(f"{self.target} exists already")
        lost_replies.rename(self.path, self.target)
        fsync_dir(self.target.parent)

    def discard(self) -> None:
        """Remove what was staged."""
        shutil.rmtree(self.path, ignore_errors=True)


class NumberedDirectories:
    """Directories ``<prefix>000012`` below a root, each of them whole or absent."""

    def __init__(self, root: Path, prefix: str) -> None:
        self.root, self._prefix = root, prefix
        self._name = re.compile(rf"{re.escape(prefix)}(\d{{6,}})", re.ASCII)

    def path_of(self, number: int) -> Path:
        return self.root / f"{self._prefix}{number:06d}"

    def number_of(self, path: Path) -> int:
        """Return the number of such a directory from its name (ValueError if the name has none)."""
        match = self._name.fullmatch(path.name)
        # of several ways to write a number one is its name: a copy with one more zero is another directory
        if match is None or path.name != self.path_of(int(match[1])).name:
            raise ValueError(f"{path} is not a numbered directory: its name is not like {self.path_of(12).name}")
        return int(match[1])

    def numbers(self) -> list[int]:
        """Return the numbers that exist, ascending.

        Lists the directory rather than asking for a name: an NFS client may remember for a minute that a
        name did not exist, but a listing is revalidated.
        """
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        found = ((int(match[1]), name) for name in names if (match := self._name.fullmatch(name)))
        return sorted(number for number, name in found if name == self.path_of(number).name)

    def remove(self, number: int) -> None:
        """Remove a directory: hidden at once, then deleted, so that no reader opens a half-deleted one."""
        path = self.path_of(number)
        hidden = path.with_name(f"{_REMOVED_PREFIX}{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            lost_replies.rename(path, hidden)
        except FileNotFoundError:
            return
        fsync_dir(self.root)  # or a power failure could leave its name and not all of its files
        shutil.rmtree(hidden, ignore_errors=True)
