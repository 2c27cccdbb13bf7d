"""Live readers and their leases, as one process observes them by its own clock.

The collector and the publisher each keep a `ReaderWatch`. A reader is alive while its names change: a name that was
first seen here more than the expiry time ago, by this process's monotonic clock, is dead. A watch that has just begun
counts every name as alive for that long, so a restart errs towards keeping.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.storage.msgspec_types import prepared
from hpcrl.weights.lifetime.readers import KEEP_NAME_S, READERS_DIR, ReaderName, ReaderRecord, parse_name

_LISTINGS = 8


class ReaderWatch:
    """Readers of a run, as this process observes them."""

    def __init__(self, root: Path, *, expiry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to watch; nothing is read yet.

        Parameters
        ----------
        root:
            The directory of versions.
        expiry_s:
            Time in seconds for which a name may stay unchanged before its reader counts as dead.
        clock:
            Seconds by this process's own clock.
        """
        self._directory, self._expiry_s, self._clock = root / READERS_DIR, expiry_s, clock
        self._first_seen: dict[str, float] = {}
        self._records: dict[str, ReaderRecord] = {}

    def observe(self) -> list[ReaderRecord]:
        """Return the newest record of each live reader, by name.

        Raises
        ------
        HandoffError
            The directory or the record of a live reader cannot be read: its leases are unknown.
        """
        problem: Exception | None = None
        for _ in range(_LISTINGS):
            names = self._list()
            newest: dict[tuple[str, str], tuple[ReaderName, str]] = {}
            for name in names:
                parsed = parse_name(name)
                if parsed is not None:
                    key = (parsed.reader, parsed.incarnation)
                    newest[key] = max(newest.get(key, (parsed, name)), (parsed, name))
            # only the newest name counts: an older one must not keep a reader alive that has died
            dead = self._dead(name for _, name in newest.values())
            try:
                records = [self._read(name) for _, name in sorted(newest.values()) if name not in dead]
            except FileNotFoundError as error:
                problem = error  # replaced since the listing
                continue
            self._records = {name: record for name, record in self._records.items() if name in names}
            return records
        raise HandoffError(f"{self._directory}: records change faster than they can be read: {problem}")

    def acknowledged_version(self) -> int | None:
        """Return the newest version that every live reader has loaded; None where one has none, or without readers.

        The base of a delta may advance to this version at most: a reader can apply a delta only to what it has.

        Raises
        ------
        HandoffError
            See `observe`.
        """
        acknowledged = [record.acknowledged for record in self.observe()]
        versions = [version for version in acknowledged if version is not None]
        return min(versions) if versions and len(versions) == len(acknowledged) else None

    def wanted_version(self) -> int | None:
        """Return the newest announced version that a live reader could not pull, and does without; None for none.

        Raises
        ------
        HandoffError
            See `observe`.
        """
        return max((record.wanted for record in self.observe() if record.wanted is not None), default=None)

    def forget_dead(self) -> list[str]:
        """Remove the names of dead readers, and their partial files; return those names.

        Only for the one collector of the root. A reader that was only slow comes back with its next renewal.

        Raises
        ------
        HandoffError
            The directory cannot be listed, or not in time.
        """
        dead = sorted(self._dead(self._list()))
        for name in dead:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()
        return dead

    def _dead(self, names: Iterable[str]) -> set[str]:
        """Return the names that were not renewed in time, at one moment."""
        now = self._clock()
        return {name for name in names if now - self._first_seen[name] > self._expiry_s}

    def _list(self) -> set[str]:
        for _ in range(_LISTINGS):
            started = time.monotonic()
            try:
                names = set(os.listdir(self._directory))
            except FileNotFoundError:
                names = set()
            except OSError as error:
                raise HandoffError(f"{self._directory} cannot be listed: {error}") from error
            if time.monotonic() - started < KEEP_NAME_S:
                break
        else:
            raise HandoffError(f"{self._directory}: a listing takes more than {KEEP_NAME_S:g} s and may miss readers")
        now = self._clock()
        self._first_seen = {name: self._first_seen.get(name, now) for name in names}
        return names

    def _read(self, name: str) -> ReaderRecord:
        if name not in self._records:
            path = self._directory / name
            try:
                self._records[name] = msgspec.json.decode(path.read_bytes(), type=prepared(ReaderRecord))
            except FileNotFoundError:
                raise
            except (OSError, msgspec.DecodeError) as error:
                raise HandoffError(f"{path} cannot be read: {error}") from error
        return self._records[name]
