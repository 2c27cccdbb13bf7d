"""One writer at a time, also where an old one is still alive: a fence that the filesystem itself enforces.

A store is a directory whose entries appear by ``rename``. Every writer builds its entries in a hidden directory of
its own below the store::

    .writer-000002-5f0c1d9a/         the writer with token 2
      step-000020/                   being built; its rename to ../step-000020 is the commit
      aside-step-000010/             taken out of the store by a rename; a claim puts it back
      deleting-2c8e4b07/             what was taken out for good

The token is the number of the run's attempt. A process that begins with a newer token *claims* the store: it makes its
own directory, moves everything out of the directories of older writers, and removes these. From then on each change
that an older process still tries (a commit, a removal) is a rename from or into a directory that does not exist, which
the file server refuses. The older process need not cooperate: it may be stopped, disconnected, or on a node that is
thought dead. The protocol needs no lock, no lease time and no clock, and every step is an operation that NFS does
atomically. A writer directory is made only by its claim, so an older writer cannot restore its own.

The directory of the newest writer stays when it ends: an older one that wakes up later still finds it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import FencedError
from hpcrl.storage import lost_replies
from hpcrl.storage.files import fsync_dir, make_directory

_WRITER = re.compile(r"\.writer-(\d{6,})-[0-9a-f]{8}")
_ASIDE = "aside-"
_MAX_ROUNDS = 100
"""Maximum attempts to empty a directory in which another process is still creating files."""


@dataclass(frozen=True)
class Fence:
    """The right to change a store. Picklable: one process claims, all ranks of the writer may use it.

    Attributes
    ----------
    root:
        The store.
    token:
        Orders writers: the attempt of the run.
    nonce:
        Distinguishes writers with the same token; of two, the later claim wins.
    """

    root: Path
    token: int
    nonce: str

    @property
    def path(self) -> Path:
        """Return this writer's hidden directory."""
        return self.root / f".writer-{self.token:06d}-{self.nonce}"

    @classmethod
    def claim(cls, root: Path, token: int) -> Fence:
        """Become the only writer of ``root``; older writers can change nothing in it once this returns.

        What older writers had half built is removed. An entry that one had put aside and had not yet replaced or
        begun to delete is put back.

        Raises
        ------
        FencedError
            A writer with a newer token was here; nothing was changed.
        """
        make_directory(root)
        fence = cls(root, token, uuid.uuid4().hex[:8])
        # make the own directory first, then list: of two concurrent claims at least one sees the other; and NFS does
        # not list a directory that this machine has just changed from a stale cache
        lost_replies.make_own_directory(fence.path)
        fsync_dir(root)
        try:
            others = [(number, path) for number, path in _writers(root) if path != fence.path]
            if newer := [number for number, _ in others if number > token]:
                raise FencedError(_message(root, token, max(newer)))
            for _, path in others:
                fence._evict(path)
            # a newer claim may have come meanwhile and have removed this one's directory
            fence.check()
            fence._clean()
        except BaseException as error:
            shutil.rmtree(fence.path, ignore_errors=True)
            if isinstance(error, FileNotFoundError):  # the own directory is gone: a newer claim came during this one
                raise FencedError(_message(root, token, _newest(root))) from error
            raise
        return fence

    def check(self) -> None:
        """Raise `FencedError` if a newer writer has claimed the store.

        This is only an early check: the store is protected because renames of older writers fail.
        """
        if self.path.name not in os.listdir(self.root):
            raise FencedError(_message(self.root, self.token, _newest(self.root)))

    def create(self, name: str) -> Path:
        """Create an empty directory in which the entry ``name`` is built; remove what an earlier failure left there.

        Raises
        ------
        FencedError
            A newer writer has claimed the store.
        OSError
            The filesystem refuses.
        """
        path = self.path / name
        self._clear(path)
        try:
            lost_replies.make_own_directory(path)  # without its parent: see the module
        except FileNotFoundError:
            self.check()
            raise
        return path

    def _clear(self, path: Path) -> None:
        """Remove what a failure had left, or move it away (OSError if the filesystem refuses both)."""
        try:
            lost_replies.remove_tree(path)
        except OSError:
            # a file that is still open stays in its directory on NFS; the next claim removes it
            lost_replies.rename(path, self.path / f"deleting-{uuid.uuid4().hex[:8]}")

    def discard(self, name: str) -> None:
        """Remove what was being built."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def commit(self, name: str, *, replace: bool = True) -> None:
        """Give the directory built by `create` its name in the store. Its files must be durable already.

        An entry of that name is replaced: it is put aside first and put back if the new one fails. Between the two
        renames neither exists; after a crash there the next claim puts the old one back.

        Parameters
        ----------
        replace:
            Whether an entry of that name may exist already.

        Raises
        ------
        FencedError
            A newer writer has claimed the store.
        FileExistsError
            An entry of that name exists, and it may not be replaced; nothing was changed.
        OSError
            The filesystem refused; the store is as before.
        """
        built, target, aside = self.path / name, self.root / name, self.path / f"{_ASIDE}{name}"
        # names must be durable before the entry is visible: after a power failure it must have all of its files
        for directory, _, _ in os.walk(built):
            fsync_dir(Path(directory))
        try:
            replaces = replace and _rename(target, aside)
            # a listing and not stat: an NFS client may remember for a while that a name did not exist
            if not replace and name in os.listdir(self.root):
                raise FileExistsError(f"{target} exists already")
            try:
                lost_replies.rename(built, target)
            except OSError:
                if replaces:
                    lost_replies.rename(aside, target)
                raise
        except FileNotFoundError:
            # a missing source or target directory mostly means a newer claim: report that instead
            self.check()
            raise
        fsync_dir(self.root)
        if replaces:
            self.delete(name)

    def hide(self, name: str) -> bool:
        """Put an entry aside with one rename; return whether it existed. `restore` or `delete` follows.

        Raises
        ------
        FencedError
            A newer writer has claimed the store.
        """
        try:
            return _rename(self.root / name, self.path / f"{_ASIDE}{name}")
        finally:
            # False may also mean that this writer's directory is gone: then the caller must not believe it
            self.check()

    def restore(self, name: str) -> None:
        """Restore the entry that `hide` took out."""
        lost_replies.rename(self.path / f"{_ASIDE}{name}", self.root / name)

    def move_hidden(self, name: str, target: Path) -> None:
        """Move the entry that `hide` took out to another place on the same filesystem."""
        self._settle()  # else a power failure could leave it in both places
        lost_replies.rename(self.path / f"{_ASIDE}{name}", target)

    def adopt(self, name: str, source: Path) -> None:
        """Make a directory from elsewhere on the same filesystem an entry, and replace an entry of that name.

        After a crash during this the next claim puts it into the store.
        """
        if self.hide(name):
            self.delete(name)
        lost_replies.rename(source, self.path / f"{_ASIDE}{name}")
        self.restore(name)
        self._settle()

    def delete(self, name: str) -> None:
        """Delete the entry that `hide` took out; the next claim deletes what cannot be deleted now."""
        # the new name marks it as garbage: a claim restores entries that are put aside, and deletes these
        doomed = self.path / f"deleting-{uuid.uuid4().hex[:8]}"
        if _rename(self.path / f"{_ASIDE}{name}", doomed):
            self._settle()  # else a power failure could leave the old name without all of its files
            shutil.rmtree(doomed, ignore_errors=True)

    def _evict(self, other: Path) -> None:
        """Empty and remove the directory of another writer, so that nothing can be renamed from or into it."""
        for round_number in range(_MAX_ROUNDS):
            try:
                names = os.listdir(other)
            except FileNotFoundError:
                return  # another claim was faster
            # moved and not deleted: a rename takes an entry from its writer at once, deletion would race with it
            for i, name in enumerate(names):
                entry = name.removeprefix(_ASIDE)
                # an entry that its writer had put aside returns to the store unless a successor is there already;
                # a listing: an NFS client may remember for a while that a name did not exist
                if entry != name and entry not in os.listdir(self.root) and _rename(other / name, self.root / entry):
                    continue
                _rename(other / name, self.path / f"evicted-{other.name[1:]}-{round_number}-{i}")
            if names:
                self._settle()  # moved entries must be durable before their old directory goes
            try:
                other.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                # not empty: the older writer still creates files; what it makes next is moved in another round
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return
        raise FencedError(f"{other} cannot be emptied: another process still writes to it\n    hint: end that process")

    def _clean(self) -> None:
        """Delete what was taken from other writers, and what crashed removers have left."""
        self._settle()  # also makes the removal of the other writers' directories durable
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for name in os.listdir(self.root):
            if name.startswith((".removed-", ".staging-")):
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _settle(self) -> None:
        """Make renames between the store and this writer's directory durable (FencedError if that is gone)."""
        try:
            fsync_dir(self.path)
        except FileNotFoundError:
            self.check()
            raise
        fsync_dir(self.root)


def _writers(root: Path) -> Iterator[tuple[int, Path]]:
    for name in os.listdir(root):
        if match := _WRITER.fullmatch(name):
            yield int(match[1]), root / name


def _newest(root: Path) -> int | None:
    return max((token for token, _ in _writers(root)), default=None)


def _rename(source: Path, target: Path) -> bool:
    """Rename; return False if the source does not exist (or the target's directory: ask `Fence.check`)."""
    try:
        lost_replies.rename(source, target)
    except FileNotFoundError:
        return False
    return True


def _message(root: Path, token: int, newest: int | None) -> str:
    who = "its directory was removed" if newest is None else f"attempt {newest} writes there"
    return (
        f"attempt {token} may not write to {root} any more: {who}\n"
        "    hint: no action is needed if the newer attempt works; this process is a leftover and must end"
    )
