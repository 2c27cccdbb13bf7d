"""Asking a Mooncake master over HTTP: health, segments, metrics."""

from __future__ import annotations

import http.client
import re
import urllib.request

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.network.http_body import read_body
from hpcrl.storage.msgspec_types import decode_json

_MAX_BYTES = 64 << 20
"""Maximum size of an answer of the master."""
_SAMPLE = re.compile(r'^(\w+)(?:\{segment="([^"]+)"\})? ([0-9.eE+-]+)$', re.MULTILINE)


class PoolSegment(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that one engine rank gives to the pool.

    Attributes
    ----------
    name:
        ``host:port`` of the rank.
    capacity_bytes, used_bytes:
        Its size, and what blocks take of it.
    """

    name: str
    capacity_bytes: int
    used_bytes: int

    @property
    def host(self) -> str:
        return self.name.rsplit(":", 1)[0]


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pool now.

    Attributes
    ----------
    segments:
        In order of their names.
    keys:
        Blocks in the pool.
    clients:
        Ranks that the master heard of lately.
    metrics:
        All samples without labels, by Mooncake's names (``master_put_start_requests_total`` …).
    """

    segments: list[PoolSegment]
    keys: int
    clients: int
    metrics: dict[str, float]

    @property
    def capacity_bytes(self) -> int:
        return sum(segment.capacity_bytes for segment in self.segments)

    @property
    def used_bytes(self) -> int:
        return sum(segment.used_bytes for segment in self.segments)


class StoreAdmin:
    """The admin server of one master.

    Parameters
    ----------
    url:
        ``http://host:port``.
    timeout_s:
        For one answer.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        self.url, self._timeout_s = url, timeout_s
        # proxies are for external addresses
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def healthy(self) -> bool:
        """Return whether the master serves. A client's own health check always succeeds and cannot be used."""
        try:
            return bool(decode_json(self._get("/health")).get("service_ready"))
        except (HpcrlError, msgspec.DecodeError, AttributeError):
            return False

    def status(self) -> PoolStatus:
        """Return the segments, keys and metrics.

        Raises
        ------
        HpcrlError
            The master does not answer, or something else than it should; names it.
        """
        try:
            return self._status()
        except (ValueError, OverflowError) as error:
            raise HpcrlError(f"the answer of the KV store's master at {self.url} cannot be read: {error}") from error

    def _status(self) -> PoolStatus:
        names = self._get("/get_all_segments").decode().split()
        plain: dict[str, float] = {}
        by_segment: dict[str, dict[str, float]] = {}
        for name, segment, value in _SAMPLE.findall(self._get("/metrics").decode()):
            if segment:
                by_segment.setdefault(segment, {})[name] = float(value)
            else:
                plain[name] = float(value)
        return PoolStatus(
            segments=[
                PoolSegment(
                    name=name,
                    capacity_bytes=int(by_segment.get(name, {}).get("segment_total_capacity_bytes", 0)),
                    used_bytes=int(by_segment.get(name, {}).get("segment_allocated_bytes", 0)),
                )
                for name in sorted(names)
            ],
            keys=int(plain.get("master_key_count", 0)),
            clients=int(plain.get("master_active_clients", 0)),
            metrics=plain,
        )

    def _get(self, path: str) -> bytes:
        try:
            with self._opener.open(self.url + path, timeout=self._timeout_s) as answer:
                return read_body(answer, _MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise HpcrlError(f"the KV store's master at {self.url} does not answer: {error}") from error
