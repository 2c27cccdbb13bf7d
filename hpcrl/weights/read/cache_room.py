"""Space in a node's cache of weights: its segments, their readers, and which segments may be removed.

The files are those that `hpcrl.weights.read.nodecache` describes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

from hpcrl.weights.format.segments import Segment, SegmentMap
from hpcrl.weights.read.ownership import live_owners

READING = ".reading-"
"""Prefix of the file with the progress of a process that loads the version; its owner follows."""
SEEN = ".seen-"
"""Separator of the number of a segment and the owner of a process that has mapped it."""
LONGEST_POLL_S = 0.05
"""Maximum seconds between two looks at the cache while a process waits for others."""


class CacheRoom:
    """Segments of all versions below ``directory``, at most ``limit_bytes`` together.

    Parameters
    ----------
    segment_limit_s:
        Returns the timeout in seconds of making room for a number of bytes.
    """

    def __init__(self, directory: Path, *, limit_bytes: int, segment_limit_s: Callable[[int], float]) -> None:
        self.directory = directory
        self._limit_bytes, self._segment_limit_s = limit_bytes, segment_limit_s

    def versions(self) -> list[Path]:
        """Return the directories of all versions that are in the cache."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(
                p for p in self.directory.iterdir() if p.is_dir() and p.name != "members" and p.name[0] != "."
            )
        return []

    def version_dir(self, segments: SegmentMap) -> Path:
        """Return the directory of a version; it may not be there yet."""
        return self.directory / segments.key

    def segment_path(self, segments: SegmentMap, segment: Segment) -> Path:
        """Return the file of a segment; it may not be there yet."""
        return self.version_dir(segments) / segment.file / str(segment.part)

    def readers(self, key: Path) -> list[str]:
        """Return the owners of live processes that load the version of the directory ``key``."""
        return [name for name in live_owners(key, READING) if name]

    def make_room(self, segments: SegmentMap, segment: Segment, stopped: Callable[[], bool]) -> None:
        """Wait until a segment fits (OSError ENOSPC where that takes too long, CancelledError when ``stopped``).

        No process loads further ahead of the slowest reader than the cache is large. So there is always space for the
        segments that this reader needs, and it makes progress.
        """
        deadline = time.monotonic() + self._segment_limit_s(segment.bytes)
        number = segments.number(segment)
        while True:
            window = self._window(segments, number)
            missing = self._used() + segment.bytes - self._limit_bytes
            if number not in window and number > window.start:
                fits = False
            else:
                fits = missing <= 0 or self._evict(missing, segments, window) >= missing
            if fits:
                return
            if stopped():
                raise CancelledError
            if time.monotonic() > deadline:
                raise OSError(errno.ENOSPC, "no process of this node has finished with what is in the cache")
            time.sleep(LONGEST_POLL_S)

    def _window(self, segments: SegmentMap, number: int) -> range:
        """Return the segments that may be in the cache: from the slowest reader's on, as many as fit."""
        start = stop = min(self._positions(segments), default=number)
        size = 0
        for segment in segments.in_order[start:]:
            size += segment.bytes
            if size > self._limit_bytes:
                break
            stop += 1
        return range(start, max(stop, start + 1))

    def _positions(self, segments: SegmentMap) -> list[int]:
        """Return the positions of the live readers of a version."""
        directory, found = self.version_dir(segments), []
        for reader in self.readers(directory):
            with contextlib.suppress(OSError):
                text = (directory / f"{READING}{reader}").read_text()
                found.append(int(text) if text.isdecimal() else 0)
        return found

    def _used(self) -> int:
        total = 0
        for key in self.versions():
            for directory, _, names in os.walk(key):
                for name in names:
                    if _is_data(name):
                        with contextlib.suppress(OSError):
                            total += os.stat(os.path.join(directory, name)).st_size
        return total

    def _evict(self, wanted: int, segments: SegmentMap, window: range) -> int:
        """Remove segments that are not needed any more, or are outside of the window; return their bytes."""
        freed = 0
        own = self.version_dir(segments)
        for key in self.versions():
            readers = self.readers(key)
            for file in sorted(path for path in key.iterdir() if path.is_dir()):
                for path in sorted((p for p in file.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name)):
                    if freed >= wanted:
                        return freed
                    marks = [path.with_name(f"{path.name}{SEEN}{reader}") for reader in readers]
                    outside = key == own and segments.number_of(file.name, int(path.name)) not in window
                    if outside or all(mark.exists() for mark in marks):
                        with contextlib.suppress(FileNotFoundError):
                            freed += path.stat().st_size
                            path.unlink()
                            for mark in file.glob(f"{path.name}{SEEN}*"):
                                mark.unlink(missing_ok=True)
        return freed


def _is_data(name: str) -> bool:
    return name.isdecimal() or name.endswith(".loading")


def remove_if_deserted(directory: Path) -> None:
    """Remove a cache that no live process uses."""
    if not live_owners(directory / "members", ""):
        remove(directory)


def remove(directory: Path) -> None:
    """Remove a directory of the cache, hidden first, so that a reader finds a segment completely or not at all."""
    hidden = directory.with_name(f".removed-{directory.name}-{os.getpid()}-{time.monotonic_ns()}")
    with contextlib.suppress(OSError):
        os.rename(directory, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
