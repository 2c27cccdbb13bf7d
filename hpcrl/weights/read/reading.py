"""One version being read: its segments in order, some of them ahead, and its tensors."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from hpcrl.errors import HandoffError
from hpcrl.weights.format.manifest import OpenedVersion
from hpcrl.weights.format.segments import SEGMENT_BYTES, Segment, SegmentMap
from hpcrl.weights.read.assemble import ServedVersion, StoredTensor, assemble
from hpcrl.weights.read.nodecache import NodeCache
from hpcrl.weights.read.segment_memory import OwnMemory, SegmentMemory
from hpcrl.weights.read.share import Pace

_T = TypeVar("_T")
Load = Callable[[SegmentMap, Segment, SegmentMemory], None]


class SkippedVersion(NamedTuple):
    """Version that could not be loaded, and why."""

    version: int
    reason: str


class LoadedVersion(NamedTuple, Generic[_T]):
    """Result of `hpcrl.weights.read.subscriber.Subscriber.load_newest`."""

    version: int
    value: _T
    skipped: list[SkippedVersion]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """Settings of reading.

    Attributes
    ----------
    expiry_s:
        See `hpcrl.weights.lifetime.readers.Registration`; equal for all parties of a run.
    pace:
        Time limits of reads.
    streams:
        Segments that are read ahead, each by a thread of its own.
    segment_bytes:
        See `hpcrl.weights.format.segments`.
    cache_dir:
        Directory of this node for sharing among its processes; None: every process reads for itself.
    cache_bytes:
        Maximum size of the cache.
    fanout_host:
        Address to serve other nodes at; None: neither serve nor ask them. Needs ``cache_dir``.
    fanout_degree:
        Nodes that one node serves for each segment; 1 is a chain.
    verify:
        Verify the hashes of all data that comes from the shared filesystem.
    fabric:
        Pull versions over the fabric where their writer serves them there.
    """

    expiry_s: float = 60.0
    pace: Pace = field(default_factory=Pace)
    streams: int = 4
    segment_bytes: int = SEGMENT_BYTES
    cache_dir: Path | None = None
    cache_bytes: int = 1 << 62
    fanout_host: str | None = None
    fanout_degree: int = 2
    verify: bool = True
    fabric: bool = True


class Reading:
    """Leased version that is being read.

    Attributes
    ----------
    handoff:
        Version that is read.
    """

    def __init__(
        self,
        maps: dict[int, SegmentMap],
        *,
        settings: ReaderSettings,
        pool: ThreadPoolExecutor,
        cache: NodeCache | None,
        load: Load,
        keep: Callable[[int], None],
    ) -> None:
        """Prepare; nothing is read yet.

        Parameters
        ----------
        maps:
            Segments of the versions that it is made from, oldest first, itself last.
        settings, pool, cache:
            Parts of the reader.
        load:
            Fills memory with a segment, verified.
        keep:
            Holds a version until it is acknowledged.
        """
        self._maps, self._settings, self._pool, self._cache = maps, settings, pool, cache
        self._load_segment, self._keep = load, keep
        self.handoff = list(maps.values())[-1].handoff
        self._total = sum(segments.handoff.manifest.total_bytes for segments in maps.values())
        self._deadline = time.monotonic() + settings.pace.limit_s(self._total)
        self._ahead: dict[tuple[int, int], Future[memoryview]] = {}
        self._at: dict[int, int] = {}
        # of versions that are read in parts: segments that are needed
        self._wanted: dict[int, Sequence[int]] = {}
        self._closed = False

    @property
    def chain(self) -> list[OpenedVersion]:
        """Return the versions to reconstruct this one from, oldest first, itself last."""
        return [segments.handoff for segments in self._maps.values()]

    def close(self) -> None:
        """Drop segments that were read ahead. A read in progress ends by itself, and its result is discarded."""
        self._closed = True
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def keep(self) -> None:
        """Keep this version leased until it is acknowledged, also after the context has ended.

        The version is in memory already.
        """
        self._keep(self.handoff.version)

    def read(self, version: int, file: str, offset: int, size: int) -> memoryview:
        """Return ``size`` verified bytes of a file of ``version``, which is this one or one of its chain.

        No copy is made where they lie in one segment. Segments that follow are read ahead, so go forward.

        Raises
        ------
        HandoffError
            They cannot be read, are wrong, or take too long.
        """
        segments = self._maps[version]
        if not size:
            return memoryview(b"")
        first = segments.at(file, offset)
        if offset + size <= first.offset + first.bytes:
            start = offset - first.offset
            return self._segment(segments, first)[start : start + size]
        result = memoryview(bytearray(size))
        done = 0
        while done < size:
            segment = segments.at(file, offset + done)
            start = offset + done - segment.offset
            part = self._segment(segments, segment)[start : start + size - done]
            result[done : done + len(part)] = part
            done += len(part)
        return result

    def tensors(
        self, served: ServedVersion | None = None, only: Collection[str] | None = None
    ) -> Iterator[StoredTensor]:
        """Yield all tensors, verified, one at a time, in the order that is fastest to read; deltas are applied.

        For an adapter these are its own; see `base_tensors`.

        Parameters
        ----------
        served:
            Version that the caller has in memory; only deltas against it are read then.
        only:
            Names of tensors; no segment of others is read. None: all.

        Raises
        ------
        HandoffError
            See `read`.
        """
        own = self.chain[-1:] if self.handoff.manifest.kind == "lora" else self.chain
        if only is not None:
            self._want(self._maps[own[0].version], only)
        return assemble(own, self.read, served, only=only)

    def base_tensors(self, only: Collection[str]) -> Iterator[StoredTensor]:
        """Yield the tensors of the version that an adapter changes, as `tensors` does; no segment of others is read.

        Raises
        ------
        HandoffError
            See `read`.
        """
        self._want(next(iter(self._maps.values())), only)
        return assemble(self.chain[:-1], self.read, only=only)

    def _want(self, whole: SegmentMap, only: Collection[str]) -> None:
        """Restrict reading this version to some tensors, so that no other data is read ahead."""
        records = whole.handoff.manifest.tensors
        wanted = {n for name in only if name in records for n in whole.numbers_of(records[name])}
        self._wanted[whole.handoff.version] = sorted(wanted)

    def _segment(self, segments: SegmentMap, segment: Segment) -> memoryview:
        version, number = segments.handoff.version, segments.number(segment)
        if self._cache is not None and self._at.get(version) != number:
            self._at[version] = number
            self._cache.advance(segments, number)
        ahead = self._from(version, number, len(segments.in_order))
        for wanted in ahead:
            if (version, wanted) not in self._ahead:
                self._ahead[version, wanted] = self._pool.submit(self._load, segments, segments.in_order[wanted])
        for key in [key for key in self._ahead if key[0] == version and key[1] not in (number - 1, *ahead)]:
            self._ahead.pop(key).cancel()
        try:
            return self._ahead[version, number].result(max(0.0, self._deadline - time.monotonic()))
        except FutureTimeoutError:
            limit = self._settings.pace.limit_s(self._total)
            raise HandoffError(
                f"{segments.handoff.path / segment.file}: version {self.handoff.version} ({self._total:,} bytes) "
                f"was not read within {limit:.0f} s"
            ) from None

    def _from(self, version: int, number: int, end: int) -> Sequence[int]:
        """Return the segment ``number`` and those that will be read after it, as many as there are streams."""
        wanted = self._wanted.get(version, range(end))
        begin = bisect_left(wanted, number)
        return wanted[begin : begin + 1 + self._settings.streams]

    def _load(self, segments: SegmentMap, segment: Segment) -> memoryview:
        def load(into: SegmentMemory) -> None:
            self._load_segment(segments, segment, into)

        if self._cache is not None:
            return self._cache.get(segments, segment, load, stopped=lambda: self._closed)
        memory = OwnMemory(segment.bytes)
        load(memory)
        return memory.room()
