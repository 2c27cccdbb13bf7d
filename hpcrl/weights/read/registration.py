"""Who an engine is among the readers of a run, as JSON: vLLM's engines are started with it, calls are compared with it.

Where an engine reads, as whom, and where it serves other nodes is said when it is started. Who calls it afterwards can
only be of the same opinion.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.weights.read.reading import ReaderSettings
from hpcrl.weights.read.share import Pace

__all__ = ["ReaderIdentity", "check_same_reader"]


class ReaderIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One reader of a run, as its orchestrator names it; JSON with these keys.

    Attributes
    ----------
    name:
        To register under, different for each process that reads.
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
    """Whether a caller takes an engine for what it is.

    Parameters
    ----------
    given:
        ``root`` and ``reader`` (an `ReaderIdentity`) of the call; what is not there is not compared.
    root, name, settings:
        What the engine was started with. None: it was not said.

    Raises
    ------
    ValueError
        They differ in where the engine reads, its name, its cache, or where it serves other nodes.
    """
    if root is None:
        return  # outside of a run: it reads where it is told, as nobody
    reader = given.get("reader") or {}
    pairs = {
        "root": (given.get("root"), root),
        "name": (reader.get("name"), name),
        "cache_dir": (reader.get("cache_dir"), settings.cache_dir),
        # host names have no case, and that of a URL has lost it
        "fanout_host": (reader.get("fanout_host"), settings.fanout_host and settings.fanout_host.lower()),
    }
    for key, (said, own) in pairs.items():
        same = str(said).lower() == own if key == "fanout_host" else said == (own and str(own))
        if key == "root" and said is not None:
            same = Path(said).resolve() == root.resolve()
        if said is not None and not same:
            raise ValueError(f"this engine was started with {key} {own}; a call cannot make that {said}")
