"""Reading from the shared filesystem: verified, with bounded retries of what passes and a deadline from bytes."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import HandoffError
from hpcrl.weights.format.segments import Segment, first_wrong_byte
from hpcrl.weights.visibility import exists_uncached

_log = logging.getLogger(__name__)

_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.05
#: transient errors, and how often each is retried in one read
_FORGIVEN = {errno.ESTALE: _ATTEMPTS, errno.ENOENT: _ATTEMPTS, errno.ENOTDIR: _ATTEMPTS, errno.EIO: 1}
_WRONG_CONTENT = -1
_SHORT = -2


@dataclass(frozen=True, slots=True)
class Pace:
    """Time limits of reading.

    Attributes
    ----------
    floor_s:
        Minimum timeout of any read in seconds.
    bytes_per_s:
        Minimum rate that counts as working.
    """

    floor_s: float = 30.0
    bytes_per_s: float = 50.0 * (1 << 20)

    def limit_s(self, size: int) -> float:
        """Return how many seconds ``size`` bytes may take."""
        return self.floor_s + size / self.bytes_per_s


def read_small(path: Path) -> bytes:
    """Read a whole small file, with the retries of `ShareReader`: stale handles and entries of NFS are looked up again.

    Raises
    ------
    HandoffError
        It does not exist, also in a listing of its directory; or it cannot be read. Names the file.
    """
    seen: dict[int, int] = {}
    pause = _FIRST_PAUSE_S
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return path.read_bytes()
        except OSError as error:
            number = error.errno or errno.EIO
            seen[number] = seen.get(number, 0) + 1
            if seen[number] > _FORGIVEN.get(number, 0) or attempt == _ATTEMPTS:
                raise HandoffError(f"{path} cannot be read: {error.strerror} (attempt {attempt}; given up)") from error
            if number != errno.EIO and not (exists_uncached(path.parent) and exists_uncached(path)) and attempt > 2:
                raise HandoffError(f"{path} does not exist: {error.strerror}") from error
        time.sleep(pause)
        pause *= 2
    raise AssertionError("unreachable")


class ShareReader:
    """Reads segments of versions from the share.

    Attributes
    ----------
    bytes_read:
        Bytes that came from the share so far, repeated reads included.
    retries:
        Reads that were repeated.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.retries = 0

    def read(self, directory: Path, segment: Segment, into: memoryview, *, verify: bool = True) -> None:
        """Read a segment and compare it with its hashes.

        ESTALE, missing names (a stale cache, or a version that is just being restored), short reads and wrong
        content (a stale page cache) are tried again, EIO once.

        Parameters
        ----------
        directory:
            The version directory.
        into:
            ``segment.bytes`` bytes; their content is undefined after an error.
        verify:
            Whether to compare.

        Raises
        ------
        HandoffError
            Naming the file, after the last attempt.
        """
        path = directory / segment.file
        deadline = time.monotonic() + self._pace.limit_s(segment.bytes)
        seen: dict[int, int] = {}
        pause = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            kind, problem = self._attempt(path, segment, into, verify)
            if not problem:
                return
            seen[kind] = seen.get(kind, 0) + 1
            forgiven = _FORGIVEN.get(kind, _ATTEMPTS if kind < 0 else 0)
            if seen[kind] > forgiven or attempt == _ATTEMPTS or time.monotonic() > deadline:
                raise HandoffError(f"{path}: {problem} (attempt {attempt}; given up)")
            _log.warning("%s: %s; attempt %d, again in %.2f s", path, problem, attempt, pause)
            with self._lock:
                self.retries += 1
            time.sleep(pause)
            pause *= 2
            if kind in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                exists_uncached(directory)
                exists_uncached(path)

    def _attempt(self, path: Path, segment: Segment, into: memoryview, verify: bool) -> tuple[int, str]:
        """Read once; return an error number and the problem, which are 0 and empty on success."""
        done = 0
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while done < segment.bytes:
                    got = os.preadv(fd, [into[done : segment.bytes]], segment.offset + done)
                    if got == 0:
                        return _SHORT, f"it ends at byte {segment.offset + done}, the manifest says otherwise"
                    done += got
                wrong = first_wrong_byte(segment, into) if verify else None
                if wrong is not None:
                    # this node's cached pages of the file may be old: the next attempt reads from the server
                    os.posix_fadvise(fd, segment.offset, segment.bytes, os.POSIX_FADV_DONTNEED)
                    return _WRONG_CONTENT, f"it does not have the content that the manifest says (at byte {wrong})"
            finally:
                os.close(fd)
        except OSError as error:
            return error.errno or errno.EIO, f"it cannot be read: {error.strerror}"
        finally:
            with self._lock:
                self.bytes_read += done
        return 0, ""
