"""Trees that sandboxes start from, kept as one file each in a private directory of the daemon."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hpcrl.sandboxes.archive import (
    DIRECTORY,
    END,
    FAILED,
    FILE,
    LINK,
    ArchiveError,
    ArchiveRecord,
    encoded,
    read_records,
    records_of,
)
from hpcrl.sandboxes.inside import NO_SPACE
from hpcrl.sandboxes.interface import SandboxError, SandboxFile, SandboxLimitError

_NAME = re.compile(r"[0-9a-f]{40}")


class TreeStore:
    """Keeps trees by a hash of their contents. Methods block; they are called in threads, of any number."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        self._uses: dict[str, int] = {}
        #: held while a tree gets its name or loses it, together with the count of its uses
        self._naming = threading.Lock()

    def add_directory(self, source: Path) -> str:
        """Keep a copy of a directory, and return its name.

        Raises
        ------
        SandboxError
            It cannot be read.
        """
        try:
            return self.add(records_of(os.fsencode(source)))
        except OSError as error:
            raise SandboxError(f"{source}: {error.strerror or error}; it is to be the tree of sandboxes") from None

    def add(self, records: Iterable[ArchiveRecord]) -> str:
        """Keep records, and return the name of their tree (OSError where the disk refuses)."""
        found = hashlib.blake2b(digest_size=20)
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".", delete=False) as stream:
            try:
                for record in records:
                    data = encoded(record)
                    found.update(data)
                    stream.write(data)
                stream.write(encoded(ArchiveRecord(END, False, b"")))
                name = found.hexdigest()
                # the tree of this name may be in use: it is replaced by a whole one, or not at all
                stream.flush()
                with self._naming:
                    os.rename(stream.name, self._directory / name)
                    self._uses[name] = self._uses.get(name, 0) + 1
            except BaseException:
                os.unlink(stream.name)
                raise
        return name

    def add_archive(self, file: Path) -> str:
        """Keep an archive that came out of a sandbox, and return its name; the file is removed.

        Raises
        ------
        ArchiveError
            It is torn, or says that it failed.
        SandboxLimitError
            It says that the files are too large.
        """
        try:
            with file.open("rb") as stream:
                return self.add(_whole(read_records(stream)))
        finally:
            file.unlink()

    def open(self, name: str) -> int:
        """Open a tree for reading, and return the file descriptor.

        Raises
        ------
        SandboxError
            There is none with this name.
        """
        try:
            return os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SandboxError(
                f"there is no tree {name!r} here\n    hint: `add_tree` and `snapshot` make trees"
            ) from None

    def files(self, name: str, paths: set[bytes]) -> dict[bytes, ArchiveRecord]:
        """Return the records of some paths of a tree."""
        with os.fdopen(self.open(name), "rb") as stream:
            return {record.path: record for record in read_records(stream) if record.path in paths}

    def scratch(self) -> Path:
        """Return the path of a new empty file for an archive."""
        handle, path = tempfile.mkstemp(dir=self._directory, prefix=".")
        os.close(handle)
        return Path(path)

    def drop(self, name: str) -> None:
        """Give a tree up; it is removed after as many calls as it was added."""
        with self._naming:
            if name in self._uses:
                self._uses[name] -= 1
                if self._uses[name] == 0:
                    del self._uses[name]
                    self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise SandboxError(f"{name[:100]!r} is not a name of a tree")
        return self._directory / name


def records_of_files(files: Mapping[str, bytes | SandboxFile], *, directories: bool = True) -> list[ArchiveRecord]:
    """Return records of files in the order of their paths.

    Parameters
    ----------
    directories:
        Add records of the directories above them, as a whole tree has them. Such a record replaces a link.

    Raises
    ------
    SandboxError
        A path is empty, or has a NUL.
    """
    records: dict[bytes, ArchiveRecord] = {}
    for name, given in files.items():
        path = os.path.normpath(os.fsencode(name))
        if path in (b".", b"/") or b"\0" in path:
            raise SandboxError(f"{name!r} is not a path of a file")
        above = os.path.dirname(path)
        while directories and above not in (b"", b"/") and not path.startswith(b"/"):
            records.setdefault(above, ArchiveRecord(DIRECTORY, False, above))
            above = os.path.dirname(above)
        file = given if isinstance(given, SandboxFile) else SandboxFile(given)
        records[path] = ArchiveRecord(LINK if file.link else FILE, file.executable, path, file.content)
    return [records[path] for path in sorted(records)]


def file_of(record: ArchiveRecord | None) -> SandboxFile | None:
    """Return the file of a record; None for a directory and for what is absent."""
    if record is None or record.kind not in (FILE, LINK):
        return None
    return SandboxFile(record.content, executable=record.executable, link=record.kind == LINK)


def _whole(records: Iterator[ArchiveRecord]) -> Iterator[ArchiveRecord]:
    for record in records:
        if record.kind == FAILED:
            what = record.content.decode("utf-8", "replace")
            raise SandboxLimitError(what) if record.path in NO_SPACE else ArchiveError(what)
        yield record
