"""The pool of KV blocks that engines share (Mooncake Store): what a recipe says about it."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import Fraction, NonNegativeFloat, PositiveFloat, StrictModel


class KvStoreConfig(StrictModel):
    """Mooncake Store: one pool of KV blocks in the host memory of all engine nodes."""

    segment_gib: PositiveFloat
    """Host memory that each engine node gives to the pool, in GiB; its ranks share it evenly."""
    local_buffer_gib: PositiveFloat = 1.0
    """Staging buffer of each rank for transfers, in GiB."""
    protocol: Literal["auto", "rdma", "tcp"] = "auto"
    """Transport between nodes. ``auto``: ``rdma`` where the node's fabric is InfiniBand or RoCE."""
    lease_ttl_s: PositiveFloat = 5.0
    """Minimum time in seconds before a block that was read may be evicted; longer than reading a prefix takes."""
    eviction_high_watermark: Fraction = 0.9
    """Share of the pool from which on blocks are evicted."""
    eviction_ratio: Fraction = 0.1
    """Share of the pool that one eviction frees."""
    client_ttl_s: PositiveFloat = 10.0
    """Time without an answer in seconds after which the segment of a node is dropped from the pool."""
    disk_gib: NonNegativeFloat = 0.0
    """Second tier on each node's scratch disk, in GiB; 0 for none. Needs ``paths.scratch`` of the site."""
