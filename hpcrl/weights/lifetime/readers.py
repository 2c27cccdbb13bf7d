"""Readers of the versions of a run: registrations with heartbeat, leases and acknowledgements, as files.

A reader writes its whole state into one small record, in a file of the directory ``.readers`` next to the versions::

    weights/.readers/engine-0.5f3a9c01~00000017.json

The name holds the reader, its incarnation (a restarted reader is another one) and a counter. Nothing is ever
overwritten: each change and each heartbeat is a *new name*, and the old one is removed a little later. So one listing
of the directory, which NFS revalidates, shows which readers exist and are alive; neither a cached name nor a cached
size can mislead. No clock of another node is used: a process that checks whether a reader is alive observes changes of
names (`hpcrl.weights.lifetime.leases.ReaderWatch`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.processes.procfs import hostname
from hpcrl.storage.files import atomic_write

_log = logging.getLogger(__name__)

READERS_DIR = ".readers"
#: Seconds for which a replaced name stays. A faster listing cannot miss both the old and the new name.
KEEP_NAME_S = 2.0
_FORMAT_VERSION = 1
#: renewals within the expiry time: this many may fail in a row before the reader counts as dead
_BEATS = 4
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_READER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = re.compile(r"(?P<reader>[A-Za-z0-9][A-Za-z0-9._-]*)\.(?P<incarnation>[0-9a-f]{12})~(?P<beat>\d{8,})\.json")


class ReaderName(NamedTuple):
    """Name of a record: reader, incarnation, and number of its heartbeats."""

    reader: str
    incarnation: str
    beat: int


def parse_name(name: str) -> ReaderName | None:
    """Read a file name of the readers directory; None where it is not a record."""
    match = _NAME.fullmatch(name)
    return None if match is None else ReaderName(match["reader"], match["incarnation"], int(match["beat"]))


class ReadSources(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a reader has read since its start, by the way they came.

    Attributes
    ----------
    share_bytes, node_bytes, fabric_bytes:
        From the shared filesystem, from other nodes, and from the trainer over the fabric.
    fabric_s:
        Seconds of all pulls over the fabric, whose threads work at the same time.
    fabric_failures:
        Pulls over the fabric that failed.
    fabric_problem:
        Reason of the last one.
    """

    share_bytes: int = 0
    node_bytes: int = 0
    fabric_bytes: int = 0
    fabric_s: float = 0.0
    fabric_failures: int = 0
    fabric_problem: str = ""


class ReaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a reader.

    Attributes
    ----------
    reader:
        Name, for example ``engine-0``.
    incarnation:
        Differs for every start of the reader.
    node:
        Its node; readers of one node share what they read.
    acknowledged:
        Newest version that it has loaded; None before the first.
    leases:
        Versions that it is reading now, parents of deltas included.
    wanted:
        Version that is only announced and that it could not pull: it asks that it becomes durable.
    url:
        URL at which its node serves versions to other nodes; empty where it does not.
    sources:
        Where the bytes came from that it has read.
    """

    reader: str
    incarnation: str
    node: str
    acknowledged: int | None = None
    leases: tuple[int, ...] = ()
    wanted: int | None = None
    url: str = ""
    sources: ReadSources = ReadSources()
    format_version: int = _FORMAT_VERSION


class Registration:
    """Own entry of a reader. `open` begins the heartbeat, `close` removes the entry.

    Methods may be called from any thread.
    """

    def __init__(
        self,
        root: Path,
        reader: str,
        *,
        expiry_s: float,
        node: str | None = None,
        sources: Callable[[], ReadSources] = ReadSources,
    ) -> None:
        """Prepare; nothing is written.

        Parameters
        ----------
        root:
            The directory of versions.
        reader:
            Name, unique among the readers that live at one time: letters, digits, dot, dash, underscore.
        expiry_s:
            After how long without a renewal others count this reader as dead, by their clocks. All parties of a run
            have the same value; renewals come four times as often.
        node:
            Name of this node; the host's by default.
        sources:
            Returns where the bytes came from that were read; called for each record.

        Raises
        ------
        ValueError
            The name cannot be part of a file name.
        """
        if not _READER.fullmatch(reader):
            raise ValueError(f"reader name {reader!r} may have letters, digits, dot, dash and underscore only")
        self.reader, self.incarnation, self.node = reader, uuid.uuid4().hex[:12], node or hostname()
        self._directory, self._expiry_s, self._sources = root / READERS_DIR, expiry_s, sources
        self._lock = threading.Lock()
        self._leases: Counter[int] = Counter()
        self._kept: int | None = None
        self._acknowledged: int | None = None
        self._wanted: int | None = None
        self._url = ""
        self._beat = 0
        self._replaced: list[tuple[float, Path]] = []
        self._current: Path | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease-{reader}", daemon=True)

    def open(self) -> Registration:
        """Register and begin the heartbeat.

        Raises
        ------
        HandoffError
            The directory cannot be written.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HandoffError(
                f"{self._directory} cannot be made, so {self.reader} cannot register: {error}"
            ) from error
        self._change()
        self._thread.start()
        return self

    def close(self) -> None:
        """Unregister, which ends all leases."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            for path in [path for _, path in self._replaced] + ([self._current] if self._current else []):
                with contextlib.suppress(OSError):  # a remaining file expires
                    path.unlink()
            self._replaced, self._current = [], None

    def __enter__(self) -> Registration:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def leases(self) -> tuple[int, ...]:
        with self._lock:
            return self._leased()

    def _leased(self) -> tuple[int, ...]:
        return tuple(sorted({*self._leases, *(() if self._kept is None else (self._kept,))}))

    def lease(self, versions: Iterable[int]) -> None:
        """Ask that ``versions`` stay. Counted: each call needs its own `release`.

        The caller must look *afterwards* whether they still have their names: only then the lease holds
        (`hpcrl.weights.lifetime.collector` says why).

        Raises
        ------
        HandoffError
            The lease could not be written, for as long as renewals lie apart; nothing is leased.
        """
        wanted = Counter(versions)
        with self._lock:
            self._leases += wanted
        deadline, pause_s = time.monotonic() + self._expiry_s / _BEATS, _FIRST_PAUSE_S
        while True:
            try:
                return self._change()
            except HandoffError as error:
                # a full or stale filesystem affects all readers, and often recovers in seconds: without retries all of
                # them would be restarted together
                if time.monotonic() > deadline or self._stop.wait(pause_s):
                    with self._lock:
                        self._leases -= wanted
                    raise
                _log.warning("%s; trying again", error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def release(self, versions: Iterable[int]) -> None:
        """Release leases. A failed write does not raise: the next renewal writes it."""
        with self._lock:
            self._leases -= Counter(versions)
        self._change_later()

    def keep(self, version: int) -> None:
        """Keep the leased ``version``, which is in memory, leased until it is acknowledged.

        Without that nothing would hold it between the end of its lease and the acknowledgement. It takes the place of
        a version that was kept before.
        """
        with self._lock:
            self._kept = version

    def acknowledge(self, version: int) -> None:
        """Record that ``version`` is loaded. A failed write does not raise: the next renewal writes it."""
        with self._lock:
            self._acknowledged, self._kept = version, None
            if self._wanted is not None and self._wanted <= version:
                self._wanted = None
        self._change_later()

    def want(self, version: int) -> None:
        """Ask that ``version``, which is only announced, becomes durable. A failed write does not raise."""
        with self._lock:
            if self._wanted is not None and version <= self._wanted:
                return
            self._wanted = version
        self._change_later()

    def serve_at(self, url: str) -> None:
        """Set the URL at which this node serves versions; an empty one ends serving."""
        with self._lock:
            if url == self._url:
                return
            self._url = url
        self._change_later()

    def _change_later(self) -> None:
        try:
            self._change()
        except HandoffError as error:
            _log.warning("%s; the next renewal tries again", error)

    def _change(self) -> None:
        """Write the record under its next name."""
        with self._lock:
            record = ReaderRecord(
                reader=self.reader,
                incarnation=self.incarnation,
                node=self.node,
                acknowledged=self._acknowledged,
                leases=self._leased(),
                wanted=self._wanted,
                url=self._url,
                sources=self._sources(),
            )
            path = self._directory / f"{self.reader}.{self.incarnation}~{self._beat:08d}.json"
            self._beat += 1  # a name whose write failed is not reused, because it may exist nevertheless
            try:
                # not durable: others see it once it is renamed, and it is meaningless after a power failure
                atomic_write(path, msgspec.json.encode(record), durable=False)
            except OSError as error:
                raise HandoffError(f"{path} cannot be written: {error}") from error
            now = time.monotonic()
            if self._current is not None:
                self._replaced.append((now, self._current))
            self._current = path
            kept = []
            for replaced_s, old in self._replaced:
                if now - replaced_s < KEEP_NAME_S:
                    kept.append((replaced_s, old))
                    continue
                with contextlib.suppress(OSError):  # expired and collected, or it expires
                    old.unlink()
            self._replaced = kept

    def _renew(self) -> None:
        while not self._stop.wait(self._expiry_s / _BEATS):
            self._change_later()
