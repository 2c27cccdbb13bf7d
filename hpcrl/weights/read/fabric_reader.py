"""Pulling segments of a version from the memory of trainer ranks, over Mooncake's transfer engine.

A segment comes from one rank or several. The header in front of each rank's data is read before and after, and has to
be the one that the record of the version implies: other data may have taken its place meanwhile, or another process the
port. Then the segment is compared with the manifest's hashes. The first failure, of whatever kind, ends the fabric for
this version and this process; the next version is pulled again. A version that is not durable is pulled again, too.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import lru_cache
from pathlib import Path

from hpcrl.errors import HandoffError, HpcrlError
from hpcrl.mooncake import TransferEngine, forget_engine, shared_engine
from hpcrl.network.interfaces import address_towards
from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.weights.format.fabric_record import (
    FABRIC_DIR,
    HEADER_BYTES,
    PAGE_BYTES,
    FabricLayout,
    FabricRecord,
    Stretch,
    decode_fabric_record,
    newest_writer,
    seal_header,
)
from hpcrl.weights.format.segments import Segment, SegmentMap, first_wrong_byte
from hpcrl.weights.read.pull_buffers import PullBuffer, PullBuffers
from hpcrl.weights.read.segment_memory import OwnMemory, SegmentMemory
from hpcrl.weights.read.share import read_small

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds after which a version without a record is looked for again."""
_KEPT = 8
"""Maximum versions whose records are remembered."""


class FabricReader:
    """Pulls segments over the fabric, where their version has a record. Methods may be called from any thread.

    Attributes
    ----------
    bytes_read, seconds:
        Bytes that were pulled and were right, and the time that pulls took, all threads together.
    failures:
        Pulls that failed.
    problem:
        Reason of the last failure; empty without one.
    buffers:
        Memory that segments are pulled into.
    """

    def __init__(self, root: Path, *, secret: Callable[[], str], streams: int, segment_bytes: int) -> None:
        """Prepare; nothing is read and no memory is allocated yet.

        Parameters
        ----------
        root:
            Directory of versions.
        secret:
            Returns the token of the run.
        streams:
            Maximum pulls at one time. As many buffers of the size of a segment are allocated, and over RDMA registered.
        segment_bytes:
            Usual size of a segment.
        """
        self._root, self._secret = root, secret
        self._lock = threading.Lock()
        self._records: dict[str, tuple[float, FabricRecord | None]] = {}
        self._layouts: dict[str, FabricLayout] = {}
        self._failed: dict[str, str] = {}
        self.buffers = PullBuffers(streams=streams, segment_bytes=segment_bytes)
        self._pool = DaemonExecutor(streams, thread_name_prefix="fabric")
        self.bytes_read = 0
        self.seconds = 0.0
        self.failures = 0
        self.problem = ""

    def close(self) -> None:
        """Stop pulling. Memory of a pull that is under way is given back when it ends."""
        self._pool.shutdown(wait=False)
        self.buffers.close()

    def protocol(self, segments: SegmentMap) -> str | None:
        """Return the protocol over which a version can be pulled; None where it has to be read in another way."""
        record = self._record(segments)
        return None if record is None else record.protocol

    def try_again(self, segments: SegmentMap) -> None:
        """Forget an earlier failure of a version, and look for its record anew."""
        with self._lock:
            self._failed.pop(segments.digest, None)
            self._records.pop(segments.digest, None)

    def fetch(self, segments: SegmentMap, segment: Segment, into: SegmentMemory) -> bool:
        """Fill ``into`` with a segment, verified; return False where it has to be read in another way.

        Raises
        ------
        OSError
            ``into`` has no space.
        """
        record, started = self._record(segments), time.monotonic()
        if record is None:
            return False
        try:
            buffer = self._pulled(record, segment)
        except (OSError, HpcrlError) as error:
            self._fail(record, f"{segment.file} segment {segment.part}: {error}")
            return False
        if buffer is None:
            return False
        if buffer.is_private and isinstance(into, OwnMemory):
            into.keep(self.buffers.lend(buffer, segment.bytes))
        else:
            try:
                into.put(buffer.data(segment.bytes))
            finally:
                self.buffers.give_back(buffer)
        # compared behind the copy: where others can write into the buffer, what was compared is what is used
        if not buffer.is_private and (wrong := first_wrong_byte(segment, into.room())) is not None:
            self._fail(record, f"{segment.file} segment {segment.part}: {_other_content(wrong)}")
            return False
        with self._lock:
            self.bytes_read += segment.bytes
            self.seconds += time.monotonic() - started
        return True

    def _pulled(self, record: FabricRecord, segment: Segment) -> PullBuffer | None:
        """Return a buffer with a segment, verified where no other process can write into it; the caller gives it back.

        None: no buffer is free in time, the version has failed meanwhile, or this reader is closed.

        Raises
        ------
        OSError, HpcrlError
            It cannot be had, in time, or is another one.
        """
        buffer = self.buffers.take(segment.bytes, record.protocol, timeout_s=record.timeout_s)
        if buffer is None:
            return None
        with self._lock:
            failed = record.digest in self._failed  # while this one waited for the buffer
        if failed:
            self.buffers.give_back(buffer)
            return None
        try:
            pulled = self._pool.submit(self._pull, record, segment, buffer)
        except RuntimeError:  # closed meanwhile
            self.buffers.give_back(buffer)
            return None
        try:
            pulled.result(record.timeout_s)
            wrong = first_wrong_byte(segment, buffer.data(segment.bytes)) if buffer.is_private else None
            if wrong is not None:
                raise HandoffError(_other_content(wrong))
        except BaseException as error:
            # a transfer that is not over may still write into it: its thread gives it back at the end
            self.buffers.give_up(buffer)
            pulled.add_done_callback(lambda done: self.buffers.give_back(buffer, done.exception()))
            if isinstance(error, FutureTimeoutError):
                raise HandoffError(f"it did not come within {record.timeout_s:g} s") from None
            raise
        return buffer

    # -- records

    def _record(self, segments: SegmentMap) -> FabricRecord | None:
        """Return the record of exactly this content; None where there is none, or a pull of it has failed."""
        digest, now = segments.digest, time.monotonic()
        with self._lock:
            if digest in self._failed:
                return None
            looked_s, record = self._records.get(digest, (-_LOOK_S, None))
        if record is not None or now - looked_s < _LOOK_S:
            return record
        try:
            record = self._look(segments)
        except (OSError, HandoffError) as error:
            _log.warning("version %d is not pulled over the fabric: %s", segments.handoff.version, error)
        with self._lock:
            self._records[digest] = now, record
            for kept in (self._records, self._failed):
                while len(kept) > _KEPT:
                    del kept[next(iter(kept))]
        return record

    def _look(self, segments: SegmentMap) -> FabricRecord | None:
        name = f"{segments.handoff.path.name}.json"
        for writer in newest_writer(os.listdir(self._root)):
            directory = self._root / writer / FABRIC_DIR
            try:
                names = os.listdir(directory)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if name not in names:
                continue
            record = decode_fabric_record(read_small(directory / name))
            if record.version != segments.handoff.version or record.digest != segments.digest:
                continue
            if writer != f".writer-{record.attempt:06d}-{record.nonce}":
                raise HandoffError(f"{directory / name} is the record of another writer")
            with self._lock:
                known = record.layout in self._layouts
            if not known:
                layout = FabricLayout.decode(read_small(directory / os.path.basename(record.layout)))
                with self._lock:
                    self._layouts[record.layout] = layout
                    while len(self._layouts) > _KEPT:
                        del self._layouts[next(iter(self._layouts))]
            return record
        return None

    def _fail(self, record: FabricRecord, why: str) -> None:
        with self._lock:
            first = record.digest not in self._failed
            self._failed[record.digest] = why
            self.failures += 1
            self.problem = why
        if first:
            _log.warning("version %d is not read over the fabric any more: %s", record.version, why)

    # -- pulling

    def _pull(self, record: FabricRecord, segment: Segment, buffer: PullBuffer) -> None:
        """Fill a buffer with a segment (OSError, HpcrlError where it cannot be had, or is not this version's)."""
        with self._lock:
            layout = self._layouts.get(record.layout)
        if layout is None:
            raise HandoffError("its layout is no longer kept")
        by_rank: dict[int, list[Stretch]] = {}
        for piece in layout.pieces(segment.file, segment.offset, segment.bytes):
            by_rank.setdefault(piece.rank, []).append(piece)
        for rank, pieces in by_rank.items():
            if not 0 <= rank < len(record.peers):
                raise HandoffError(f"its layout names rank {rank}, and it has {len(record.peers)} ranks")
            peer = record.peers[rank]
            if any(piece.at < 0 or piece.at + piece.bytes > peer.bytes for piece in pieces):
                raise HandoffError(f"a part lies outside of the memory of rank {rank}")
            engine = _engine_towards(peer.endpoint, record.protocol)
            buffer.register(engine)
            joined = _joined(pieces)
            try:
                self._check_header(engine, record, rank, buffer)
                engine.read(
                    peer.endpoint,
                    [buffer.address + PAGE_BYTES + piece.offset - segment.offset for piece in joined],
                    [peer.address + PAGE_BYTES + piece.at for piece in joined],
                    [piece.bytes for piece in joined],
                )
                # the writer takes the header away before it changes data: the data was whole when it was read
                self._check_header(engine, record, rank, buffer)
            except OSError:
                forget_engine(engine)
                raise

    def _check_header(self, engine: TransferEngine, record: FabricRecord, rank: int, buffer: PullBuffer) -> None:
        peer = record.peers[rank]
        engine.read(peer.endpoint, [buffer.address], [peer.address], [HEADER_BYTES])
        expected = seal_header(
            self._secret(),
            nonce=record.nonce,
            attempt=record.attempt,
            version=record.version,
            rank=rank,
            sequence=peer.sequence,
            size=peer.bytes,
        )
        if not hmac.compare_digest(buffer.memory[:HEADER_BYTES], expected):
            raise HandoffError(f"rank {rank} at {peer.endpoint} does not serve version {record.version} any more")


def _other_content(wrong: int) -> str:
    return f"it has other content than the manifest says (at byte {wrong})"


def _joined(pieces: list[Stretch]) -> list[Stretch]:
    """Join pieces of one rank that follow each other in the file and in its memory: each read has its own cost."""
    result: list[Stretch] = []
    for piece in pieces:
        last = result[-1] if result else None
        if last is not None and (last.offset + last.bytes, last.at + last.bytes) == (piece.offset, piece.at):
            result[-1] = last._replace(bytes=last.bytes + piece.bytes)
        else:
            result.append(piece)
    return result


def _engine_towards(endpoint: str, protocol: str) -> TransferEngine:
    return shared_engine(_own_address(endpoint.rpartition(":")[0].strip("[]")), protocol)


@lru_cache(maxsize=1024)
def _own_address(host: str) -> str:
    return address_towards(host)
