"""Cache of segments that the processes of one node share: each segment is read from the shared filesystem once.

The cache is in memory or on a disk of the node, for example in ``/dev/shm``. One process is elected for each segment,
loads and verifies it; all others map the same pages. Memory is bounded: space is freed by removing segments that every
reader of the version has mapped (a mapping outlives its name, so no reader sees a partial segment). Where space is not
free in time, a process reads for itself without the cache.

All users may write to ``base``. The cache's own directory is accessible to its owner alone, has a name that others
cannot predict, and is checked (`hpcrl.storage.trusted_paths`) before use; so is each segment. A segment that another
process has loaded is compared with the manifest's hashes the first time that this process maps it.

::

    <base>/hpcrl-weights-<uid>-<key>/
      members/<owner>                       processes that use this cache
      <version key>/.reading-<owner>        processes that are loading this version
      <version key>/<file>/<index>          a segment, complete and verified
      <version key>/<file>/<index>.lock.1   owner that is loading it
      <version key>/<file>/<index>.seen-<owner>
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

from hpcrl.storage.trusted_paths import NotOursError, check_parent, check_private, make_private, open_trusted
from hpcrl.weights.format.segments import Segment, SegmentMap, first_wrong_byte
from hpcrl.weights.read.cache_room import LONGEST_POLL_S, READING, SEEN, CacheRoom, remove, remove_if_deserted
from hpcrl.weights.read.ownership import OwnerLock, current_owner, live_owners
from hpcrl.weights.read.segment_memory import FileMemory, OwnMemory, SegmentMemory

_log = logging.getLogger(__name__)

_PREFIX = "hpcrl-weights"
_KEY_DIGITS = 32
_POLL_S = 0.002

Load = Callable[[SegmentMemory], None]
"""Fills a segment and verifies it."""


class NodeCache:
    """Cache of one store on this node, as one process sees it. Methods may be called from any thread.

    Attributes
    ----------
    directory:
        Directory of the segments of all versions.
    private_bytes:
        Bytes that this process has read for itself alone so far, because the cache could not take it in time; for
        tests.
    """

    def __init__(
        self,
        base: Path,
        root: Path,
        *,
        secret: str,
        limit_bytes: int,
        segment_limit_s: Callable[[int], float],
        verify: bool = True,
    ) -> None:
        """Join the cache; remove files that dead processes have left below ``base``.

        Parameters
        ----------
        base:
            Directory of this node, with space for ``limit_bytes``.
        root:
            Directory of versions.
        secret:
            Secret of the readers of ``root``, from which the name of the cache is derived.
        limit_bytes:
            Maximum size of segments, of all versions together.
        segment_limit_s:
            Returns the timeout in seconds for another process to load a number of bytes, or for making room for them.
        verify:
            Verify segments that another process has loaded against the manifest before they are used.

        Raises
        ------
        OSError
            ``base`` cannot be written, or other users can change it or the cache
            (`hpcrl.storage.trusted_paths.NotOursError`).
        """
        self._me, self._verify = current_owner(), verify
        # other users may list `base`: without the secret they cannot create the directory's name first
        key = hmac.digest(secret.encode(), b"node cache of " + bytes(root.resolve()), hashlib.sha256).hex()[
            :_KEY_DIGITS
        ]
        self.directory = base / f"{_PREFIX}-{os.getuid()}-{key}"
        self._limit_bytes, self._segment_limit_s = limit_bytes, segment_limit_s
        self._room = CacheRoom(self.directory, limit_bytes=limit_bytes, segment_limit_s=segment_limit_s)
        self._lock = threading.Lock()
        self._reading: dict[str, int] = {}
        #: segments that this process has loaded, or compared with the manifest
        self._known: dict[Path, tuple[int, int]] = {}
        self.private_bytes = 0
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_parent(base)
        for path in base.glob(f"{_PREFIX}-{os.getuid()}-*"):
            if path != self.directory and _is_ours(path):
                remove_if_deserted(path)
        for path in base.glob(f".removed-{_PREFIX}-{os.getuid()}-*"):
            if _is_ours(path):
                # the process that began to remove it has died, or this helps it
                shutil.rmtree(path, ignore_errors=True)
        self._join()

    def close(self) -> None:
        """Leave the cache; the last one removes it."""
        for path in self.directory.glob(f"*/{READING}{self._me}"):
            path.unlink(missing_ok=True)
        (self.directory / "members" / str(self._me)).unlink(missing_ok=True)
        remove_if_deserted(self.directory)

    @contextmanager
    def reading(self, segments: SegmentMap) -> Iterator[None]:
        """Mark the version as being loaded by this process inside the context.

        Segments that this process has not read stay in the cache while there is space.
        """
        mark = self._room.version_dir(segments) / f"{READING}{self._me}"
        with self._lock:
            self._reading[segments.key] = self._reading.get(segments.key, 0) + 1
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text("0")
        try:
            yield
        finally:
            with self._lock:
                self._reading[segments.key] -= 1
                if not self._reading[segments.key]:
                    mark.unlink(missing_ok=True)

    def advance(self, segments: SegmentMap, number: int) -> None:
        """Record that this process, which reads in order, has reached segment ``number`` and needs no earlier one."""
        with contextlib.suppress(OSError):  # only a hint for evictions by others, which otherwise wait a little
            (self._room.version_dir(segments) / f"{READING}{self._me}").write_text(str(number))

    def get(
        self, segments: SegmentMap, segment: Segment, load: Load, *, stopped: Callable[[], bool] = lambda: False
    ) -> memoryview:
        """Return a segment's bytes: mapped, or read for this process alone where the cache cannot take it in time.

        The view may be written to: its pages are private once they are.

        Parameters
        ----------
        stopped:
            Returns whether the segment is not needed any more: end in a `CancelledError` rather than wait.

        Raises
        ------
        CancelledError
            See ``stopped``.
        Exception
            Any exception of ``load``. An unusable cache is not an error.
        """
        deadline, pause = time.monotonic() + 2 * self._segment_limit_s(segment.bytes), _POLL_S
        path = self._room.segment_path(segments, segment)
        while segment.bytes <= self._limit_bytes and time.monotonic() < deadline:
            try:
                view = self._map(path, segment)
                if view is not None:
                    return view
                done = self._load_if_elected(path, segments, segment, load, stopped)
            except OSError as error:
                _log.warning("the weight cache %s cannot be used: %s", self.directory, error)
                break
            if not done:
                if stopped():
                    raise CancelledError
                time.sleep(pause)
                pause = min(LONGEST_POLL_S, 2 * pause)
        memory = OwnMemory(segment.bytes)
        load(memory)
        with self._lock:
            self.private_bytes += segment.bytes
        return memory.room()

    def file_of(self, segments: SegmentMap, segment: Segment, load: Load) -> Path | None:
        """Return the file that holds a segment, loaded if missing; None where the cache cannot take it."""
        path = self._room.segment_path(segments, segment)
        if not path.exists():
            self.get(segments, segment, load)
        return path if path.exists() else None

    def drop_others(self, keys: set[str]) -> None:
        """Remove versions that no process loads, except ``keys``."""
        with self._lock:
            self._known = {path: known for path, known in self._known.items() if path.parent.parent.name in keys}
        for path in self._room.versions():
            if path.name not in keys and not self._room.readers(path):
                remove(path)

    # -- loading

    def _load_if_elected(
        self, path: Path, segments: SegmentMap, segment: Segment, load: Load, stopped: Callable[[], bool]
    ) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = OwnerLock(path.with_name(f"{path.name}.lock"))
        if not lock.acquire():
            return False
        try:
            if not path.exists():
                self._room.make_room(segments, segment, stopped)
                self._load(path, segment, load)
        finally:
            lock.release()
        return True

    def _load(self, path: Path, segment: Segment, load: Load) -> None:
        # a loader that died used the same name: its remains are removed
        temporary = path.with_name(f".{path.name}.loading")
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            load(FileMemory(fd, segment.bytes))
            os.ftruncate(fd, max(1, segment.bytes))  # an empty file cannot be mapped
            os.fchmod(fd, 0o400)
            os.rename(temporary, path)
            self._note(path, fd)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _map(self, path: Path, segment: Segment) -> memoryview | None:
        """Return the pages of a segment; None where it is missing, or contradicted the manifest and was removed."""
        try:
            fd = open_trusted(path)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(fd).st_size < max(1, segment.bytes):
                raise NotOursError(f"{path} is shorter than its segment")
            view = memoryview(mmap.mmap(fd, max(1, segment.bytes), access=mmap.ACCESS_COPY))[: segment.bytes]
            if self._verify and self._known.get(path) != _identity(fd):
                if (wrong := first_wrong_byte(segment, view)) is not None:
                    _log.warning("%s is not what the manifest says (at byte %d); it is loaded anew", path, wrong)
                    path.unlink(missing_ok=True)
                    return None
                self._note(path, fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):  # removed with its version; the pages stay
            path.with_name(f"{path.name}{SEEN}{self._me}").touch()
        return view

    def _note(self, path: Path, fd: int) -> None:
        with self._lock:
            self._known[path] = _identity(fd)

    def _join(self) -> None:
        member = self.directory / "members" / str(self._me)
        for _ in range(100):
            # another process may remove a deserted cache between these lines, so check that the member file exists
            with contextlib.suppress(FileNotFoundError):
                make_private(self.directory)
                member.parent.mkdir(exist_ok=True, mode=0o700)
                member.touch()
                if member.exists():
                    break
        for path in self.directory.rglob(".*.loading"):
            # a process that is loading has a lock with a live owner
            if not live_owners(path.parent, f"{path.name[1:].removesuffix('.loading')}.lock.", owner_inside=True):
                path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    try:
        check_private(path)
    except OSError:
        return False
    return True


def _identity(fd: int) -> tuple[int, int]:
    """Return an identity that differs for every content that a name has had."""
    status = os.fstat(fd)
    return status.st_ino, status.st_ctime_ns
