"""Blocks that several ranks of a node train on, fetched from another node once and mapped by all of them.

::

    <base>/hpcrl-dock-<uid>-<32 digits>/      mode 0700; the digits follow from the run's token
      alive                                   locked by each rank (`hpcrl.storage.shm_directories`)
      room                                    locked by a rank that takes memory
      000012/                                 a step
        000001-000001.columns.4096            a block, complete and compared with its hash, mode 0400
        000001-000001.columns.4096.part       locked by the rank that fetches it

It needs no extra process: for each block ranks elect one of them by a lock that is released when its holder dies, so
that another one takes over. A rank that begins to fetch a step removes those before the last one, whose ranks have met
in collectives since; mapped blocks stay until they are unmapped. A block from another rank is compared with its hash
when it is mapped. Where memory is full, or a block does not come in time, a rank fetches it for itself alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.ledger.payload import check_block
from hpcrl.dock.warehouse.interface import Location, half_at_most, key_of
from hpcrl.dock.warehouse.payload_files import view_block
from hpcrl.storage.shm_directories import join_owned, leave_owned, remove_dead
from hpcrl.storage.trusted_paths import check_parent, make_private, open_trusted

_log = logging.getLogger(__name__)

_PART = ".part"
_DIGITS = 32
_POLL_S, _LONGEST_POLL_S = 0.002, 0.05
_PATIENCE_S = 120.0
"""Seconds that a rank waits for another one's block: longer than that one waits for a server that is silent."""
_SLOWEST_BYTES_S = 20e6
"""Rate in bytes a second by which the wait for a block is longer."""
_ROOM_S = 10.0
_TRIES = 3
"""Maximum number of fetches of a block that was damaged in memory."""

Load = Callable[[PayloadPlace, memoryview], None]
"""Fills memory with a block, and compares it with its hash (OSError, ValueError)."""


class Found(NamedTuple):
    """A block, and whether this rank has fetched it."""

    block: memoryview
    own: bool


class Sharing:
    """State by which a rank shares blocks with the other ranks of its node; for one thread at a time."""

    def __init__(self, base: Path, *, limit_bytes: int) -> None:
        """Share nothing yet.

        Parameters
        ----------
        base:
            Directory of this node, in memory (``/dev/shm``).
        limit_bytes:
            Most bytes of blocks that ranks of this node may read there; half of what is free where that is less.
        """
        self._base, self._limit_bytes = base, limit_bytes
        self._blocks: SharedBlocks | None = None
        self._warehouse = ""

    def of(self, location: Location, authorization: str, step: int) -> SharedBlocks | None:
        """Return the blocks of ``step`` of a warehouse.

        None is returned, and a warning logged, where this node does not permit sharing.
        """
        try:
            if self._blocks is None or self._warehouse != location.directory or not self._blocks.here:
                self.close()
                # others may list base: without the token they cannot take the name first
                named = hmac.digest(authorization.encode(), f"blocks of {location.directory}".encode(), hashlib.sha256)
                self._blocks = SharedBlocks(self._base, named.hex()[:_DIGITS], limit_bytes=self._limit_bytes)
                self._warehouse = location.directory
            self._blocks.begin(step)
        except OSError as error:
            _log.warning(
                "blocks of step %d are not shared in %s (%s): each rank of this node fetches all of its own\n"
                "    hint: rollouts.warehouse.directory names a directory in memory that exists on the trainer's nodes",
                step,
                self._base,
                error,
            )
            return None
        return self._blocks

    def close(self) -> None:
        """Leave the others; the last one removes what they had."""
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None


class SharedBlocks:
    """Blocks of one warehouse on another node, as one rank sees them; for one thread at a time.

    Attributes
    ----------
    directory:
        Directory of this node.
    """

    def __init__(self, base: Path, digits: str, *, limit_bytes: int) -> None:
        """Join those who share; what the dead of this user have left below ``base`` is removed.

        Raises
        ------
        OSError
            ``base`` or the directory is not fit for it, or others' to change.
        """
        check_parent(base)
        for left in remove_dead(base):
            _log.info("removed %s, left by processes that have ended", left)
        self._limit = half_at_most(limit_bytes, shutil.disk_usage(base).free, str(base))
        self.directory, self._alive = join_owned(base, digits)
        self._step = self.directory
        self._own: dict[str, memoryview] = {}
        """Blocks of this step that this rank has fetched, and that were not read yet."""

    @property
    def here(self) -> bool:
        """Return whether the directory still exists."""
        return _is_at(self._alive, f"{self.directory}/alive")

    def begin(self, step: int) -> None:
        """Begin to read blocks of ``step``, and remove those before the previous step, which are not read any more."""
        self._own.clear()
        self._step = self.directory / f"{step:06d}"
        make_private(self._step)
        for path in self.directory.iterdir():
            if path.name.isdecimal() and int(path.name) < step - 1:
                shutil.rmtree(path, ignore_errors=True)

    def fetch(self, places: Sequence[PayloadPlace], load: Load) -> None:
        """Fetch those blocks that are not here, and that no other rank is about to: ranks divide them by this."""
        for place in places:
            # the later read reports the reason
            with contextlib.suppress(OSError, ValueError):
                if not os.path.exists(self._path(place)):
                    self._fetch_if_elected(place, load)

    def read(self, place: PayloadPlace, load: Load) -> Found:
        """Return the block at ``place``, read-only.

        ``load`` fetches it, unless another rank of the node has fetched it or is fetching it.

        Raises
        ------
        OSError, ValueError
            It cannot be shared: memory is full, another rank does not finish fetching it in time, or ``load`` fails.
        """
        deadline, pause = time.monotonic() + _PATIENCE_S + place.bytes / _SLOWEST_BYTES_S, _POLL_S
        damaged = 0
        while True:
            if (own := self._own.pop(key_of(place), None)) is not None:
                return Found(own, own=True)
            try:
                return Found(self._look(place), own=False)
            except FileNotFoundError:
                pass
            except ValueError as error:
                damaged += 1
                _log.warning("%s is damaged in memory, and is fetched again: %s", self._path(place), error)
                if damaged == _TRIES:
                    raise
            if not self._fetch_if_elected(place, load):
                if time.monotonic() > deadline:
                    raise TimeoutError("the rank of this node that fetches the block does not finish")
                time.sleep(pause)
                pause = min(_LONGEST_POLL_S, 2 * pause)

    def close(self) -> None:
        """Leave the others; the last one removes the directory. What is mapped stays."""
        leave_owned(self.directory, self._alive)

    def _path(self, place: PayloadPlace) -> str:
        return f"{self._step}/{key_of(place)}"

    def _look(self, place: PayloadPlace) -> memoryview:
        """Return a block that exists (FileNotFoundError where not; ValueError where it was damaged, and is removed)."""
        path = self._path(place)
        fd = open_trusted(path)
        try:
            block = view_block(fd, place.bytes)
            check_block(block, place)
        except ValueError:
            _unlink_if(fd, path)
            raise
        finally:
            os.close(fd)
        return block

    def _fetch_if_elected(self, place: PayloadPlace, load: Load) -> bool:
        """Fetch a block that is missing; return False where another rank is fetching it."""
        path = self._path(place)
        part = path + _PART
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not _is_at(fd, part):  # it was completed between the two calls
                return True
            try:
                if os.path.exists(path):
                    return True
                self._take_room(fd, place.bytes)
                block = self._load(fd, place, load)
                os.fchmod(fd, 0o400)
                with self._room():  # a process that counts sees exactly one of the two names
                    os.rename(part, path)
                self._own[key_of(place)] = block
            finally:
                _unlink_if(fd, part)
            return True
        finally:
            os.close(fd)

    def _load(self, fd: int, place: PayloadPlace, load: Load) -> memoryview:
        pages = mmap.mmap(fd, place.bytes)
        with memoryview(pages) as view:
            load(place, view)
        return view_block(fd, place.bytes)

    def _take_room(self, fd: int, size: int) -> None:
        """Allocate the pages of a file (OSError without room): a full filesystem is an error here, not a SIGBUS."""
        with self._room():
            # the part that a killed rank has written is overwritten
            os.truncate(fd, 0)
            if self._held() + size > self._limit:
                limit = f"{self._limit / (1 << 30):.2f} GiB"
                raise OSError(errno.ENOSPC, f"blocks that this node shares would take more than {limit}")
            os.posix_fallocate(fd, 0, size)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Keep other ranks from taking memory, or renaming it, inside the block."""
        fd = os.open(self.directory / "room", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _ROOM_S
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"a rank of this node has kept {self.directory}/room locked") from None
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(fd)

    def _held(self) -> int:
        """Return the bytes of all blocks that are here, or are being fetched."""
        total = 0
        for step in os.scandir(self.directory):
            if step.name.isdecimal():
                with contextlib.suppress(FileNotFoundError):  # its step has ended
                    for each in os.scandir(step.path):
                        with contextlib.suppress(FileNotFoundError):
                            total += each.stat(follow_symlinks=False).st_size
        return total


def _is_at(fd: int, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False


def _unlink_if(fd: int, path: str) -> None:
    """Remove a name where it is still that of this file: of several that find damage, one takes it away."""
    if _is_at(fd, path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
