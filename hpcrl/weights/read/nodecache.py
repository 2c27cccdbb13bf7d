"""Sharing what is read among the processes of one node: each segment comes from the share once.

The cache lies on memory or a disk of the node, for example in ``/dev/shm``. One process is elected for each segment,
loads and verifies it; all others map the same pages. Memory is bounded: room is made by removing segments that every
reader of the version has mapped (a mapping outlives its name, so nothing is ever torn), and where there is none in
time, a process reads for itself and leaves the cache alone.

``base`` belongs to everybody. The cache's own directory can be entered by its owner alone, has a name that others
cannot know beforehand, and is looked at (`hpcrl.ours`) before it is believed; so is each segment. What another process
has loaded is compared with the manifest's hashes the first time that this process maps it.

::

    <base>/hpcrl-weights-<uid>-<key>/
      members/<owner>                       processes that use this cache
      <version key>/.reading-<owner>        processes that are loading this version
      <version key>/<file>/<index>          a segment, complete and verified
      <version key>/<file>/<index>.lock.1   who is loading it
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

from hpcrl.ours import NotOursError, check_parent, check_private, make_private, open_ours
from hpcrl.weights.format.segments import Segment, SegmentMap, first_wrong_byte
from hpcrl.weights.read.cache_room import LONGEST_POLL_S, READING, SEEN, CacheRoom, remove, remove_if_deserted
from hpcrl.weights.read.ownership import OwnerLock, living, myself

__all__ = ["NodeCache"]

_log = logging.getLogger(__name__)

_PREFIX = "hpcrl-weights"
_KEY_DIGITS = 32
_POLL_S = 0.002

Load = Callable[[memoryview], None]
"""Fills a segment and verifies it."""


class NodeCache:
    """The cache of one store on this node, as one process sees it. Methods may be called from any thread.

    Attributes
    ----------
    directory:
        Where segments of all versions lie.
    private_bytes:
        What this process has read for itself alone so far, because the cache could not take it in time; for tests.
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
        """Join the cache; what the dead have left below ``base`` is removed.

        Parameters
        ----------
        base:
            Directory of this node, with room for ``limit_bytes``.
        root:
            The directory of versions.
        secret:
            What only readers of ``root`` know: the name of the cache is made from it.
        limit_bytes:
            Most bytes of segments, of all versions together.
        segment_limit_s:
            How long to wait for another process to load so many bytes, or to make room for them.
        verify:
            Compare what another process has loaded with the manifest before it is used.

        Raises
        ------
        OSError
            ``base`` cannot be written, or it or the cache is others' to change (`hpcrl.ours.NotOursError`).
        """
        self._me, self._verify = myself(), verify
        # others may list base: without the secret they cannot take the name first
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
                shutil.rmtree(path, ignore_errors=True)  # who began to remove it has died, or is not faster alone
        self._join()

    def close(self) -> None:
        """Leave the cache; the last one removes it."""
        for path in self.directory.glob(f"*/{READING}{self._me}"):
            path.unlink(missing_ok=True)
        (self.directory / "members" / str(self._me)).unlink(missing_ok=True)
        remove_if_deserted(self.directory)

    @contextmanager
    def reading(self, segments: SegmentMap) -> Iterator[None]:
        """This process loads the version inside; segments that it has not seen stay while there is room."""
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
        """This process reads in order and has come to segment ``number``; it needs no earlier one."""
        with contextlib.suppress(OSError):  # it tells others what may go; they wait a little otherwise
            (self._room.version_dir(segments) / f"{READING}{self._me}").write_text(str(number))

    def get(
        self, segments: SegmentMap, segment: Segment, load: Load, *, stopped: Callable[[], bool] = lambda: False
    ) -> memoryview:
        """A segment's bytes: mapped, or read for this process alone where the cache cannot take it in time.

        The view may be written to: its pages are private once they are.

        Parameters
        ----------
        stopped:
            Nobody wants it any more: end in a `CancelledError` rather than wait.

        Raises
        ------
        CancelledError
            See ``stopped``.
        Exception
            What ``load`` raises. A cache that cannot be used is no error.
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
        buffer = memoryview(bytearray(segment.bytes))
        load(buffer)
        with self._lock:
            self.private_bytes += segment.bytes
        return buffer

    def file_of(self, segments: SegmentMap, segment: Segment, load: Load) -> Path | None:
        """The file that holds a segment, loaded where it was not there; None where the cache cannot take it."""
        path = self._room.segment_path(segments, segment)
        if not path.exists():
            self.get(segments, segment, load)
        return path if path.exists() else None

    def drop_others(self, keys: set[str]) -> None:
        """Remove versions that nobody loads, but for ``keys``."""
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
        # one who died over it had the same name: what it left is taken over
        temporary = path.with_name(f".{path.name}.loading")
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, max(1, segment.bytes))  # a full memory filesystem is an error here, not a SIGBUS
            pages = mmap.mmap(fd, max(1, segment.bytes))
            with pages, memoryview(pages) as view, view[: segment.bytes] as data:
                load(data)
            os.fchmod(fd, 0o400)
            os.rename(temporary, path)
            self._note(path, fd)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _map(self, path: Path, segment: Segment) -> memoryview | None:
        """The pages of a segment; None where it is not there, or was not what the manifest says and is removed."""
        try:
            fd = open_ours(path)
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
            # who removes a deserted cache may do so between these lines: look whether we are in
            with contextlib.suppress(FileNotFoundError):
                make_private(self.directory)
                member.parent.mkdir(exist_ok=True, mode=0o700)
                member.touch()
                if member.exists():
                    break
        for path in self.directory.rglob(".*.loading"):
            # who loads has a lock with a living owner
            if not living(path.parent, f"{path.name[1:].removesuffix('.loading')}.lock.", owner_inside=True):
                path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    try:
        check_private(path)
    except OSError:
        return False
    return True


def _identity(fd: int) -> tuple[int, int]:
    """Another one for every content that a name has had."""
    status = os.fstat(fd)
    return status.st_ino, status.st_ctime_ns
