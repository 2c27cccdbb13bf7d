"""What an engine is told of how to read versions, where it learns that from a call and not from its command line."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcrl.weights.reading import ReaderSettings
from hpcrl.weights.share import Pace

__all__ = ["Invitation"]


class Invitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One reader of a run, as its orchestrator names it; JSON with these keys.

    Attributes
    ----------
    name:
        To register under, different for each process that reads.
    expiry_s, streams, cache_dir, cache_bytes, fanout_host, fanout_degree:
        See `hpcrl.weights.reading.ReaderSettings`.
    floor_s, min_bytes_per_s:
        See `hpcrl.weights.share.Pace`.
    """

    name: str
    expiry_s: float
    floor_s: float
    min_bytes_per_s: float
    streams: int
    cache_dir: str | None = None
    cache_bytes: int = 1 << 62
    fanout_host: str | None = None
    fanout_degree: int = 2

    @property
    def settings(self) -> ReaderSettings:
        return ReaderSettings(
            expiry_s=self.expiry_s,
            pace=Pace(self.floor_s, self.min_bytes_per_s),
            streams=self.streams,
            cache_dir=None if self.cache_dir is None else Path(self.cache_dir),
            cache_bytes=self.cache_bytes,
            fanout_host=self.fanout_host,
            fanout_degree=self.fanout_degree,
        )
