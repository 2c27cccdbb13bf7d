"""Tells engines who they are among the readers of a run's versions, and how they read.

The embedded engine has all of that on its command line, and looks at none of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hpcrl.config.recipe import HandoffConfig, Recipe
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.weights.read.registration import ReaderIdentity


class ReaderRegistration:
    """Introduces engines to a store of versions."""

    def __init__(self, handoff: HandoffConfig, root: Path, *, fans_out: bool) -> None:
        """Remember settings; nothing is sent.

        Parameters
        ----------
        handoff:
            Settings of the recipe.
        root:
            The directory of versions.
        fans_out:
            Whether nodes give versions to each other.
        """
        self._handoff, self._root, self._fans_out = handoff, root, fans_out

    @classmethod
    def of(cls, recipe: Recipe, root: Path) -> ReaderRegistration:
        """Make the registration by the recipe of a run."""
        return cls(recipe.handoff, root, fans_out=recipe.fans_out)

    async def register(self, client: EngineClient, *, limit_s: float) -> None:
        """Register each server of an engine as a reader (`EngineError` where one refuses). May be repeated."""
        servers = client.servers
        names = [client.name] if len(servers) == 1 else [f"{client.name}-{rank}" for rank in range(len(servers))]
        await asyncio.gather(
            *(
                server.control(
                    "/init_weight_transfer_engine", {"init_info": self._info(name, server)}, timeout_s=limit_s
                )
                for name, server in zip(names, servers, strict=True)
            )
        )

    def _info(self, name: str, server: EngineClient) -> dict[str, Any]:
        handoff = self._handoff
        identity = ReaderIdentity(
            name=name,
            expiry_s=handoff.lease_timeout_s,
            floor_s=handoff.update_timeout_s,
            min_bytes_per_s=handoff.min_bandwidth_mib_s * (1 << 20),
            streams=handoff.read_streams,
            cache_dir=handoff.node_cache,
            cache_bytes=int(handoff.node_cache_gib * (1 << 30)),
            # other nodes reach it at the host of its request address
            fanout_host=urlsplit(server.url).hostname if self._fans_out else None,
            fanout_degree=handoff.fanout_degree,
        )
        return {"root": str(self._root), "reader": msgspec.to_builtins(identity)}
