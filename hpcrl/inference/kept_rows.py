"""Rows of experts that an engine keeps until the orchestrator fetches them (`hpcrl.network.routed_experts_reference`).

No torch is imported.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from hpcrl.network.routed_experts_reference import RowsReference, digest_of

_LIMIT_BYTES = 1 << 30
_KEEP_S = 3600.0
"""Seconds that rows are kept: those of a prompt are fetched after its answer, which may take another engine long."""
_LATE_S = 2.0


class KeptRows:
    """The store, in one event loop; the oldest rows go first.

    Attributes
    ----------
    bytes:
        Bytes of all rows.
    """

    def __init__(self, *, limit_bytes: int = _LIMIT_BYTES, keep_s: float = _KEEP_S) -> None:
        """Begin, empty.

        Parameters
        ----------
        limit_bytes:
            Maximum bytes of all rows together.
        keep_s:
            Seconds after which rows that were not requested are dropped: their request was given up.
        """
        self._limit, self._keep_s = limit_bytes, keep_s
        self._rows: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._news: dict[str, asyncio.Event] = {}
        self.bytes = 0

    def keep(self, name: str, rows: bytes, *, engine: str, digest: str = "") -> RowsReference:
        """Keep a file of rows under a name; return the reference for the answer.

        Parameters
        ----------
        engine:
            ``host:port`` of this engine, as the caller knows it.
        digest:
            Digest of the rows, if it is known.
        """
        self._drop(name)
        self._rows[name] = (time.monotonic(), rows)
        self.bytes += len(rows)
        while self._rows and (self.bytes > self._limit or self._expired(next(iter(self._rows)))):
            self._drop(next(iter(self._rows)))
        if name in self._news:
            self._news[name].set()
        return RowsReference(engine, name, len(rows), digest or digest_of(rows))

    async def take(self, name: str, *, late: bool = False) -> bytes | None:
        """Return and remove the rows; None if there are none.

        Parameters
        ----------
        late:
            Whether the rows may still arrive: then they are waited for, for seconds.
        """
        if late and name not in self._rows:
            event = self._news.setdefault(name, asyncio.Event())
            try:
                async with asyncio.timeout(_LATE_S):
                    await event.wait()
            except TimeoutError:
                pass
            finally:
                self._news.pop(name, None)
        found = name in self._rows and not self._expired(name)
        rows = self._drop(name)
        return rows if found else None

    def _expired(self, name: str) -> bool:
        return time.monotonic() - self._rows[name][0] >= self._keep_s

    def _drop(self, name: str) -> bytes | None:
        _, rows = self._rows.pop(name, (0.0, None))
        self.bytes -= len(rows or b"")
        return rows
