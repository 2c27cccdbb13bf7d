"""Identity of an engine among the readers of a run, as JSON: given at its start, and compared in later calls.

The store that an engine reads, its reader's name, and the address at which it serves other nodes are set when it is
started. A later call with other values is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.weights.read.reading import ReaderSettings
from hpcrl.weights.read.share import Pace


class ReaderIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Reader of a run, as its orchestrator names it; JSON with these keys.

    Attributes
    ----------
    name:
        Name to register under, different for each process that reads.
    expiry_s, streams, cache_dir, cache_bytes, fanout_host, fanout_degree:
        See `hpcrl.weights.read.reading.ReaderSettings`.
    floor_s, min_bytes_per_s:
        See `hpcrl.weights.read.share.Pace`.
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


def check_same_reader(
    given: Mapping[str, Any], *, root: Path | None, name: str | None, settings: ReaderSettings
) -> None:
    """Raise ValueError where a caller's view of an engine's identity contradicts that of the engine.

    Parameters
    ----------
    given:
        ``root`` and ``reader`` (an `ReaderIdentity`) of the call; missing fields are not compared.
    root, name, settings:
        Values that the engine was started with. None: it was started without.

    Raises
    ------
    ValueError
        They differ in where the engine reads, its name, its cache, or where it serves other nodes.
    """
    if root is None:
        return  # outside of a run: it reads the store of each call, without a registration
    reader = given.get("reader") or {}
    pairs = {
        "root": (given.get("root"), root),
        "name": (reader.get("name"), name),
        "cache_dir": (reader.get("cache_dir"), settings.cache_dir),
        # host names are case-insensitive, and a URL has them in lower case
        "fanout_host": (reader.get("fanout_host"), settings.fanout_host and settings.fanout_host.lower()),
    }
    for key, (said, own) in pairs.items():
        same = str(said).lower() == own if key == "fanout_host" else said == (own and str(own))
        if key == "root" and said is not None:
            same = Path(said).resolve() == root.resolve()
        if said is not None and not same:
            raise ValueError(f"this engine was started with {key} {own}; a call cannot change it to {said}")
