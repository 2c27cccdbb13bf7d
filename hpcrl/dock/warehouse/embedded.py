"""A warehouse of files in shared memory of a node: ranks of the same node map them, others ask a server.

::

    <base>/hpcrl-dock-<uid>-<32 random digits>/     mode 0700
      alive                                         locked by the process that writes
      000001-000001.columns.4096                    a block, complete

Pages of shared memory are expensive to allocate and cheap to keep: the file of a released block is overwritten with one
that fits into it. A released block must therefore not be read any more; readers compare the hash of a block first.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.ledger.payload import write_pieces
from hpcrl.dock.warehouse.interface import Figures, half_at_most, key_of
from hpcrl.storage.shm_directories import make_owned, remove_dead
from hpcrl.storage.trusted_paths import check_parent

_log = logging.getLogger(__name__)
_PAGE = 4096
_SLACK = 2
"""Maximum ratio of the size of a reused file to its new block."""


class EmbeddedWarehouse:
    """Writer of a warehouse; see `hpcrl.dock.warehouse.interface.Warehouse`.

    Attributes
    ----------
    directory:
        Directory of its files.
    """

    def __init__(self, base: Path, *, limit_bytes: int) -> None:
        """Make a private directory, and remove those of dead writers of this user.

        Parameters
        ----------
        base:
            Directory of this node, in memory (``/dev/shm``).
        limit_bytes:
            Maximum bytes of files; they take at most half of the space that is free there now.

        Raises
        ------
        OSError
            ``base`` is not there, is not fit for it, or refuses.
        """
        check_parent(base)
        for left in remove_dead(base):
            _log.info("removed %s, left by a process that has ended", left)
        # collectives and engines of the node use this memory, too
        self._limit = half_at_most(limit_bytes, shutil.disk_usage(base).free, str(base))
        self.directory, self._alive = make_owned(base)
        # strings: joining two paths of pathlib takes as long as writing a short rollout
        self._below = f"{self.directory}/"
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        """Bytes of the file of each block."""
        self._free: list[tuple[int, str]] = []
        """Files of blocks that were released, with their bytes."""
        self._held, self._refused, self._number, self._full, self._closed = 0, 0, 0, False, False

    @property
    def full(self) -> bool:
        return self._full

    def put(self, place: PayloadPlace, pieces: Sequence[bytes | memoryview]) -> bool:
        """Write a block into a file of its own."""
        size = -(-place.bytes // _PAGE) * _PAGE
        with self._lock:
            if self._closed or not self._make_room(size):
                self._refused += 1
                self._full = not self._closed
                return False
            staged, held = self._file_for(size)
        # without the lock: an event loop that releases blocks does not wait for megabytes
        try:
            self._write(staged, pieces, held)
            os.rename(self._below + staged, self._below + key_of(place))
        except OSError as error:
            with self._lock:
                self._remove(staged, held)
                self._refused += 1
                self._full = error.errno in (errno.ENOSPC, errno.EDQUOT) and not self._closed
            _log.warning("the warehouse of rollouts cannot keep a block of %d bytes: %s", place.bytes, error)
            return False
        with self._lock:
            self._sizes[key_of(place)] = held
        return True

    def _make_room(self, size: int) -> bool:
        """Return whether a file of ``size`` bytes fits; files that are kept for reuse are removed where necessary."""
        if any(size <= held <= _SLACK * size for held, _ in self._free):
            return True
        while self._free and self._held + size > self._limit:
            held, name = self._free.pop(0)
            self._remove(name, held)
        return self._held + size <= self._limit

    def _file_for(self, size: int) -> tuple[str, int]:
        fitting = [each for each in self._free if size <= each[0] <= _SLACK * size]
        if fitting:
            held, name = min(fitting)
            self._free.remove((held, name))
            return name, held
        self._number += 1
        self._held += size
        return f"new-{self._number}", size

    def _write(self, name: str, pieces: Sequence[bytes | memoryview], held: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._below + name, flags, 0o600)
        try:
            write_pieces(fd, pieces, 0)
            if os.fstat(fd).st_size < held:
                os.truncate(fd, held)
        finally:
            os.close(fd)

    def _remove(self, name: str, held: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._below + name)
        self._held -= held

    def release(self, places: Iterable[PayloadPlace]) -> None:
        """Keep the files for blocks to come."""
        with self._lock:
            for place in places:
                held = self._sizes.pop(key_of(place), None)
                if held is None or self._closed:
                    continue
                self._number += 1
                name = f"free-{self._number}"
                try:
                    os.rename(self._below + key_of(place), self._below + name)
                except FileNotFoundError:
                    self._held -= held
                else:
                    self._free.append((held, name))
                self._full = False

    def figures(self) -> Figures:
        """Return the current figures."""
        with self._lock:
            return Figures(len(self._sizes), self._held, self._limit, self._refused)

    def close(self) -> None:
        """Remove the directory; mapped files stay until they are unmapped."""
        with self._lock:
            if not self._closed:
                self._closed, self._full = True, False
                shutil.rmtree(self.directory, ignore_errors=True)
                os.close(self._alive)
