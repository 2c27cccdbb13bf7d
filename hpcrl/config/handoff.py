"""The section ``handoff`` of a recipe: how versions of the weights get from the trainer to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from hpcrl.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel

__all__ = ["HandoffConfig"]


def _on_or_off(value: object) -> object:
    """YAML reads ``on`` and ``off`` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class HandoffConfig(StrictModel):
    """Weight hand-offs from trainer to engines."""

    kind: Literal["full", "fp8"] = "full"
    """``full`` publishes weights in ``dtype``; ``fp8`` quantises matrices in blocks of 128 x 128 (e4m3 with
    ``weight_scale_inv``), as vLLM reads them."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of published weights that are not quantised. None: ``trainer.dtype``."""
    overlap: bool = True
    """Write a version while the next step runs, from a copy of this rank's share in host memory."""
    staging_gib: PositiveFloat = 1.0
    """Without ``overlap``: memory of a rank for copying, in GiB (at least its share of one shard file)."""
    max_shard_gib: PositiveFloat = 4.0
    """Largest safetensors file in GiB. All ranks write into all files."""
    direct_io: bool = False
    """Write past the page cache (``O_DIRECT``) where the filesystem can."""
    delta_chain: NonNegativeInt = 0
    """Publish changes against an earlier version, which every engine has acknowledged, at most so many deltas in a
    row; then a full version. 0: full versions only. Doubles the memory of the copy."""
    delta_max_share: Fraction = 0.5
    """A delta larger than this share of the full version is not worth its trouble: the full version is written."""
    publish_timeout_s: PositiveFloat = 1800.0
    """Longest time that writing one version may take, in seconds."""
    retry_s: NonNegativeFloat = 300.0
    """How long a version is tried again that the filesystem refuses (no space, a quota, a stale handle), in seconds.
    Then the run ends, and says why. 0: not at all."""
    keep_last: PositiveInt = 3
    """Published versions that are kept beside those an engine is serving."""
    update_timeout_s: PositiveFloat = 120.0
    """Least time that an engine is given to load a version, in seconds; what a version's bytes take at
    ``min_bandwidth_mib_s`` comes on top."""
    min_bandwidth_mib_s: PositiveFloat = 50.0
    """Slowest rate, in MiB/s, at which reading weights still counts as working."""
    lease_timeout_s: PositiveFloat = 60.0
    """A reader whose registration has not changed for so long, by the clock of who looks, counts as dead: what it
    leased may go. Readers renew four times as often."""
    read_streams: PositiveInt = 4
    """Segments of 64 MiB that a reader reads ahead, each by a thread of its own."""
    node_cache: str | None = "/dev/shm"
    """Directory of the node through which its engines share what they read, so that each byte is read once a node.
    null: every engine reads for itself."""
    node_cache_gib: PositiveFloat = 16.0
    """Most memory of a node's cache, in GiB. With less than a version, engines share a window that moves through it;
    other nodes are served from it, too."""
    adapter_base_gib: NonNegativeFloat = 8.0
    """With ``trainer.lora``: most memory of a vLLM worker for blocks of layers that adapters change, as they are in the
    base, in GiB; what does not fit is read again with each version."""
    fanout: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)] = "auto"
    """Whether nodes give versions to each other, so that the share is read once and not once a node. ``auto``: where
    engines have more than one node, and there is a ``node_cache``."""
    fanout_degree: PositiveInt = 2
    """Nodes that one node gives a segment to; 1 is a chain."""
