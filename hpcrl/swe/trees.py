"""Trees of repositories: read from a directory or a tar file, with a digest, and written as a tar file."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from hpcrl.errors import UsageError
from hpcrl.sandboxes import SandboxFile

Tree = dict[str, SandboxFile]
"""Files of a repository by their paths, relative to its root."""
_MAX_BYTES = 1 << 30
"""Maximum bytes of the files of a tree."""
_MAX_FILES = 200_000
MAX_KEPT_BYTES = 1 << 30
"""Bytes of the files of trees that are kept between rollouts, once in memory and once with the sandboxes."""
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz")
_HISTORY = frozenset({".git", ".hg", ".svn"})
"""Left out: the history of a repository may have the right patch."""


class TreeError(UsageError):
    """The tree of a repository cannot be read, or is not the one that a task names."""


def read_tree(path: Path, *, digest: str = "") -> Tree:
    """Read a directory or a tar file, without its history (``.git``).

    Parameters
    ----------
    digest:
        Expected result of `tree_digest`; nothing is compared without it.

    Raises
    ------
    TreeError
        There is none, it cannot be read, it has a path outside of itself, it is too large, or its digest is another
        one.
    """
    if path.is_dir():
        try:
            tree = _read_directory(path)
        except OSError as error:
            what = f"{error.filename} cannot be read: {error.strerror}"
            raise TreeError(f"{what}\n    hint: let your user read all files of the tree") from error
    elif path.name.endswith(_SUFFIXES):
        try:
            tree = _read_tar(path)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise TreeError(f"{path} cannot be read: {error}\n    hint: make it again, or name another one") from error
    else:
        raise TreeError(f"{path} is neither a directory nor a tar file\n    hint: name one with {', '.join(_SUFFIXES)}")
    if digest and (found := tree_digest(tree)) != digest:
        what = f"{path} has the digest {found}, and its task was made with {digest}"
        raise TreeError(f"{what}\n    hint: fetch or make the tree again; a changed tree makes other tests fail")
    return tree


def tree_bytes(tree: Mapping[str, SandboxFile]) -> int:
    """Return the bytes of the files of a tree."""
    return sum(len(file.content) for file in tree.values())


def tree_digest(tree: Mapping[str, SandboxFile]) -> str:
    """Return the SHA-256 of a tree: paths, kinds, executable bits and contents."""
    digest = hashlib.sha256()
    for path in sorted(tree):
        file = tree[path]
        kind = b"l" if file.link else b"x" if file.executable else b"f"
        for part in (os.fsencode(path), kind, file.content):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()


def write_tar(path: Path, tree: Mapping[str, SandboxFile]) -> None:
    """Write a tree as a tar file; equal trees give equal bytes."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(tree):
            file = tree[name]
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755 if file.executable else 0o644
            if file.link:
                entry.type, entry.linkname = tarfile.SYMTYPE, os.fsdecode(file.content)
                archive.addfile(entry)
            else:
                entry.size = len(file.content)
                archive.addfile(entry, io.BytesIO(file.content))


def _read_directory(path: Path) -> Tree:
    tree: Tree = {}
    size = 0
    for base, directories, names in os.walk(path, onerror=_refuse):
        directories[:] = sorted(each for each in directories if each not in {*_HISTORY, "__pycache__"})
        links = [each for each in directories if (Path(base) / each).is_symlink()]
        directories[:] = [each for each in directories if each not in links]
        for name in (*links, *sorted(each for each in names if each not in _HISTORY)):
            file = Path(base) / name
            status = file.lstat()
            relative = file.relative_to(path).as_posix()
            if stat.S_ISLNK(status.st_mode):
                tree[relative] = SandboxFile(os.fsencode(file.readlink()), link=True)
            elif stat.S_ISREG(status.st_mode):
                size += status.st_size
                _check_size(path, size, len(tree))
                tree[relative] = SandboxFile(file.read_bytes(), executable=bool(status.st_mode & 0o100))
    return tree


def _refuse(error: OSError) -> None:
    # a directory that is left out would make another task
    raise error


def _read_tar(path: Path) -> Tree:
    tree: Tree = {}
    size = 0
    with tarfile.open(path) as archive:
        for entry in archive:
            name = PurePosixPath(entry.name)
            if name.is_absolute() or ".." in name.parts:
                raise TreeError(f"{path} has the path {entry.name!r}, which is outside of the tree")
            if _HISTORY & {*name.parts}:
                continue
            if entry.islnk():
                # the second name of a file, with the content of the first one
                first = tree.get(str(PurePosixPath(entry.linkname)))
                if first is None:
                    raise TreeError(f"{path} has the hard link {entry.name!r} to {entry.linkname!r}, which it has not")
                size += len(first.content)
                _check_size(path, size, len(tree))
                tree[str(name)] = first
                continue
            if not (entry.issym() or entry.isreg() or entry.isdir()):
                raise TreeError(f"{path} has {entry.name!r}, which is neither a file, a link nor a directory")
            if entry.issym():
                tree[str(name)] = SandboxFile(os.fsencode(entry.linkname), link=True)
            elif entry.isreg():
                size += entry.size
                _check_size(path, size, len(tree))
                stream = archive.extractfile(entry)
                assert stream is not None
                tree[str(name)] = SandboxFile(stream.read(), executable=bool(entry.mode & 0o100))
    return tree


def _check_size(path: Path, size: int, files: int) -> None:
    if size > _MAX_BYTES or files > _MAX_FILES:
        what = f"{path} has more than {_MAX_BYTES >> 30} GiB or {_MAX_FILES} files"
        raise TreeError(f"{what}\n    hint: leave out what the tests do not need")
