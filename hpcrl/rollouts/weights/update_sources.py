"""By which way engines have got the bytes of versions: over the fabric, from other nodes, from the share.

Readers write their counts into their registrations (`hpcrl.weights.lifetime.readers`), also when they acknowledge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from hpcrl.errors import HandoffError
from hpcrl.runs.events import EventWriter
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.readers import ReaderRecord, ReadSources

_log = logging.getLogger(__name__)

_COUNTS = ("fabric_bytes", "node_bytes", "share_bytes", "fabric_s", "fabric_failures")


class UpdateSources:
    """Counts of all readers of a run, as one process sees them.

    Attributes
    ----------
    totals:
        Sums over all readers since the start of this process.
    """

    def __init__(self, watch: ReaderWatch, events: EventWriter) -> None:
        """Begin to count; nothing is read yet."""
        self._watch, self._events = watch, events
        self._seen: dict[tuple[str, str], ReadSources] = {}
        self._looking = asyncio.Lock()
        self.totals: dict[str, float] = dict.fromkeys(_COUNTS, 0)

    async def after(self, engine: str, version: int) -> dict[str, float]:
        """Return what the readers of an engine have read since the last call, and report a fabric that failed them.

        Parameters
        ----------
        engine:
            Name of the engine, which has loaded ``version`` just now.
        """
        async with self._looking:
            try:
                records = await asyncio.to_thread(self._watch.observe)
            except HandoffError as error:
                _log.warning("the source from which %s has read version %d is unknown: %s", engine, version, error)
                return {}
            own = [record for record in records if record.reader == engine or record.reader.startswith(f"{engine}-")]
            found = self._new(own)
            present = {(record.reader, record.incarnation) for record in records}
            self._seen = {key: seen for key, seen in self._seen.items() if key in present}
        for name, value in found.items():
            self.totals[name] += value
        if failures := found.pop("fabric_failures"):
            why = next((r.sources.fabric_problem for r in own if r.sources.fabric_problem), "")
            self._events.emit("engine.fabric_failed", engine=engine, version=version, failures=failures, why=why)
        return found

    def _new(self, records: Iterable[ReaderRecord]) -> dict[str, float]:
        """Return the sums of what the counts of these readers have grown by."""
        found: dict[str, float] = dict.fromkeys(_COUNTS, 0)
        for record in records:
            key = (record.reader, record.incarnation)
            before = self._seen.get(key, ReadSources())
            for name in _COUNTS:
                found[name] += getattr(record.sources, name) - getattr(before, name)
            self._seen[key] = record.sources
        return found

    def gauges(self) -> dict[str, float]:
        """Return the totals by the names of gauges of the orchestrator."""
        return {f"weights_{name}": value for name, value in self.totals.items()}
