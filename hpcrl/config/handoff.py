"""The section ``handoff`` of a recipe: how versions of the weights get from the trainer to the engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hpcrl.config.base import (
    ExtensionName,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)


def _on_or_off(value: object) -> object:
    """Return ``on`` or ``off`` for the booleans as which YAML reads these words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class CustomSyncConfig(StrictModel):
    """Your own weight transport from the trainer (docs/extending.md). Ranks of the trainer import it."""

    factory: ExtensionName
    """``package.module:Name`` of a factory of a `hpcrl.trainer.publish.sync.WeightSync`, or the name under which an
    installed package registers one (``transport.NAME``)."""
    parameters: dict[str, Any] = {}
    """Keyword arguments for the factory, in addition to the parts that hpcrl passes."""
    try_before_submit: bool = True
    """``hpcrl recipe check`` and ``submit`` import it, too. Set ``false`` if it can only be created on a node."""


class HandoffConfig(StrictModel):
    """Weight hand-offs from trainer to engines."""

    kind: Literal["full", "fp8"] = "full"
    """``full`` publishes weights in ``dtype``; ``fp8`` quantises matrices in blocks of 128 x 128 (e4m3 with
    ``weight_scale_inv``), as vLLM reads them."""
    sync: CustomSyncConfig | None = None
    """Your own weight transport in place of the default one, which engines read as files of the run. It gets the
    default transport as an argument."""
    transport: Literal["share", "fabric"] = "share"
    """``share``: engines read versions from the shared filesystem. ``fabric``: they pull them from memory of the
    trainer's ranks over Mooncake's transfer engine, and read the shared filesystem where that fails. Needs the extra
    ``store`` for trainer and engines. Use it only on a trusted network: Mooncake does not authenticate clients."""
    fabric_protocol: Literal["tcp", "rdma"] = "tcp"
    """Protocol of ``transport: fabric``."""
    fabric_versions: PositiveInt = 1
    """Versions that the trainer serves over the fabric at one time. Each takes a rank's share of a version in host
    memory, which is registered once. With 1, an engine has until the next version is written."""
    fabric_timeout_s: PositiveFloat = 10.0
    """Maximum seconds of pulling one segment (64 MiB) over the fabric. An engine reads the version from the shared
    filesystem then, and pulls the next one again."""
    durable_every: PositiveInt = 1
    """With ``transport: fabric``: write each version whose number this divides to the shared filesystem, and each one
    that a checkpoint names, which includes the last one. Others are only served from memory and end with the trainer;
    an engine that cannot pull such a version keeps the one that it serves, and the version is written then."""
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
    """Publish changes against an earlier version, which every engine has acknowledged, at most this number of deltas in
    a row; then a full version. 0: full versions only. Doubles the memory of the copy."""
    delta_max_share: Fraction = 0.5
    """Maximum size of a delta as a share of the full version; above it, the full version is written."""
    publish_timeout_s: PositiveFloat = 1800.0
    """Timeout for writing one version, in seconds."""
    retry_s: NonNegativeFloat = 300.0
    """Maximum seconds of retries of a version that the filesystem refuses (no space, a quota, a stale handle). Then the
    run ends with the reason. 0: not at all."""
    keep_last: PositiveInt = 3
    """Published versions that are kept in addition to those that an engine is serving."""
    update_timeout_s: PositiveFloat = 120.0
    """Timeout for loading a version, in seconds, in addition to the time that its bytes take at
    ``min_bandwidth_mib_s``."""
    min_bandwidth_mib_s: PositiveFloat = 50.0
    """Minimum rate of reading weights in MiB/s; a slower reader times out."""
    lease_timeout_s: PositiveFloat = 60.0
    """Time in seconds, by the observer's clock, after which a reader with an unchanged registration counts as dead;
    versions that it leased may then be removed. Readers renew four times as often."""
    read_streams: PositiveInt = 4
    """Segments of 64 MiB that a reader reads ahead, each in a separate thread."""
    node_cache: str | None = "/dev/shm"
    """Directory on each node through which its engines share the bytes that they read, so that each byte is read once
    per node. null: every engine reads for itself."""
    node_cache_gib: PositiveFloat = 16.0
    """Maximum memory of a node's cache, in GiB. With less than a version, engines share a window that moves through it;
    other nodes are served from it, too."""
    adapter_base_gib: NonNegativeFloat = 8.0
    """With ``trainer.lora``: maximum memory in GiB of a vLLM worker for base weights of the blocks that adapters
    change; blocks that do not fit are read again with each version."""
    fanout: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)] = "auto"
    """Whether nodes pass versions to each other, so that the shared filesystem is read once, not once per node.
    ``auto``: if engines have more than one node, and a ``node_cache`` is set."""
    fanout_degree: PositiveInt = 2
    """Nodes that one node gives a segment to; 1 is a chain."""
