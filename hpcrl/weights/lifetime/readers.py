"""Who reads the versions of a run: registrations with heartbeat, leases and acknowledgements, as files.

A reader says everything in one small record, in a file of the directory ``.readers`` beside the versions::

    weights/.readers/engine-0.5f3a9c01~00000017.json

The name holds the reader, its incarnation (a restarted reader is another one) and a counter. Nothing is ever
overwritten: each change and each heartbeat is a *new name*, and the old one goes a little later. So one listing of
the directory, which NFS revalidates, shows who is there and who is alive; neither a cached name nor a cached size can
mislead. No clock of another node is ever read: whoever wants to know whether a reader lives watches names change
(`hpcrl.weights.lifetime.leases.ReaderWatch`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.fs import atomic_write
from hpcrl.procfs import hostname

__all__ = ["KEEP_NAME_S", "READERS_DIR", "ReaderName", "ReaderRecord", "Registration", "parse_name"]

_log = logging.getLogger(__name__)

READERS_DIR = ".readers"
#: A replaced name stays this long. A listing that takes less cannot miss the old name and the new one both.
KEEP_NAME_S = 2.0
_FORMAT_VERSION = 1
#: renewals within the expiry time: that many may fail in a row before others count the reader as dead
_BEATS = 4
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_READER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = re.compile(r"(?P<reader>[A-Za-z0-9][A-Za-z0-9._-]*)\.(?P<incarnation>[0-9a-f]{12})~(?P<beat>\d{8,})\.json")


class ReaderName(NamedTuple):
    """The name of a record: who, which incarnation, and how often it has spoken."""

    reader: str
    incarnation: str
    beat: int


def parse_name(name: str) -> ReaderName | None:
    """Read a file name of the readers directory; None where it is no record."""
    match = _NAME.fullmatch(name)
    return None if match is None else ReaderName(match["reader"], match["incarnation"], int(match["beat"]))


class ReaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader says of itself.

    Attributes
    ----------
    reader:
        Name, for example ``engine-0``.
    incarnation:
        Differs for every start of the reader.
    node:
        Where it runs; readers of one node share what they read.
    acknowledged:
        Newest version that it has loaded; None before the first.
    leases:
        Versions that it is reading now, parents of deltas included.
    url:
        Where its node serves versions to other nodes; empty where it does not.
    """

    reader: str
    incarnation: str
    node: str
    acknowledged: int | None = None
    leases: tuple[int, ...] = ()
    url: str = ""
    format_version: int = _FORMAT_VERSION


class Registration:
    """A reader's own entry. `open` begins the heartbeat, `close` takes the entry away.

    Methods may be called from any thread.
    """

    def __init__(self, root: Path, reader: str, *, expiry_s: float, node: str | None = None) -> None:
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

        Raises
        ------
        ValueError
            The name cannot be part of a file name.
        """
        if not _READER.fullmatch(reader):
            raise ValueError(f"reader name {reader!r} may have letters, digits, dot, dash and underscore only")
        self.reader, self.incarnation, self.node = reader, uuid.uuid4().hex[:12], node or hostname()
        self._directory, self._expiry_s = root / READERS_DIR, expiry_s
        self._lock = threading.Lock()
        self._leases: Counter[int] = Counter()
        self._kept: int | None = None
        self._acknowledged: int | None = None
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
        """Unregister; leases end with it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            for path in [path for _, path in self._replaced] + ([self._current] if self._current else []):
                with contextlib.suppress(OSError):  # what stays behind expires
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
                # a full or stale filesystem is the same for all readers, and often well again in seconds: who gave up
                # at once would be started anew, all of them together
                if time.monotonic() > deadline or self._stop.wait(pause_s):
                    with self._lock:
                        self._leases -= wanted
                    raise
                _log.warning("%s; it is tried again", error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def release(self, versions: Iterable[int]) -> None:
        """Take leases back. A failure to write is no error: the next renewal says it."""
        with self._lock:
            self._leases -= Counter(versions)
        self._change_later()

    def keep(self, version: int) -> None:
        """``version``, which is leased, is in memory and will be acknowledged: until then it stays leased.

        Without that nothing would hold it between the end of its lease and the acknowledgement. It takes the place of
        a version that was kept before.
        """
        with self._lock:
            self._kept = version

    def acknowledge(self, version: int) -> None:
        """``version`` is loaded. A failure to write is no error: the next renewal says it."""
        with self._lock:
            self._acknowledged, self._kept = version, None
        self._change_later()

    def serve_at(self, url: str) -> None:
        """This node serves versions at ``url``; an empty one ends it."""
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
                url=self._url,
            )
            path = self._directory / f"{self.reader}.{self.incarnation}~{self._beat:08d}.json"
            self._beat += 1  # a name whose write failed is not used again: it may be there all the same
            try:
                # others see it once it is renamed; it means nothing after a power failure
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
