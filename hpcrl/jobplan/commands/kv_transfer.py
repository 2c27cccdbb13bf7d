"""Transfer of the KV of a prompt from its engine to others: connectors of vLLM, their ports and programs.

Two ways, which may be used together: straight from prefill to decode (`EngineConfig.kv_transfer`), and by the pool
(`EngineConfig.kv_store`). Also the tiers of an engine for KV that no longer fits on the GPU
(`EngineMemoryConfig.kv_offload_gib`). Names are those of vLLM 0.32.
"""

from __future__ import annotations

from typing import Any, Literal

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.processes.interpreter import module_command

_POOL = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
_LOOK_AGAIN = {"kv_load_failure_policy": "recompute"}
"""KV may be found and not be there when it is fetched: the pool's lease of a block ended, it made room. vLLM's default
fails such a request with status 500; with this setting the engine looks again, and recomputes missing blocks. Blocks
that are still listed but cannot be fetched are recomputed after some tries (`hpcrl.inference.vllm.fetches`)."""
_DISK = "@kv-disk@"
"""Stands for a directory that is made on the node."""
_MOONCAKE_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


def has_rdma(cluster: ClusterProfile, role: Role) -> bool:
    """Return whether nodes of a role have adapters for RDMA."""
    node = cluster.node_of(role)
    return node is not None and node.fabric.kind != "ethernet"


def connector(recipe: Recipe, *, gpus: bool) -> Literal["mooncake", "nixl"] | None:
    """Return the connector that moves KV from prefill to decode; None without the two sides.

    Embedded engines describe the place of KV in the format of NIXL's connector.
    """
    engine = recipe.engine
    if engine.prefill is None or engine.decode is None:
        return None
    if engine.backend == "embedded":
        return "nixl"
    if engine.kv_transfer != "auto":
        return engine.kv_transfer
    return "nixl" if gpus else "mooncake"


def transfer_config(
    recipe: Recipe, role: Role, *, gpus: bool, rdma: bool, ranks_per_node: int
) -> dict[str, Any] | None:
    """Return ``--kv-transfer-config`` of an engine; None where its KV stays on its GPU."""
    connectors: list[dict[str, Any]] = []
    match connector(recipe, gpus=gpus):
        case "nixl":
            buffer = {} if gpus else {"kv_buffer_device": "cpu"}
            connectors.append({"kv_connector": "NixlConnector", "kv_role": "kv_both", **buffer})
        case "mooncake":
            extra = {"kv_connector_extra_config": {"mooncake_protocol": "rdma" if rdma else "tcp"}}
            connectors.append({"kv_connector": "MooncakeConnector", "kv_role": _MOONCAKE_ROLES[role], **extra})
    if recipe.engine.kv_store is not None:
        connectors.append(dict(_POOL))
    if offload := round(recipe.engine.memory.kv_offload_gib * (1 << 30)) // ranks_per_node:
        tiers: dict[str, Any] = {"cpu_bytes_to_use": offload}
        if recipe.engine.memory.kv_offload_disk_gib:
            disk = {"type": "fs", "root_dir": _DISK}
            tiers |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [disk]}
        extra = {"kv_connector_extra_config": tiers}
        connectors.append({"kv_connector": "OffloadingConnector", "kv_role": "kv_both", **extra})
    if not connectors:
        return None
    if len(connectors) == 1:
        return connectors[0] | _LOOK_AGAIN
    children = {"kv_connector_extra_config": {"connectors": connectors}}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", **children, **_LOOK_AGAIN}


def disk_command(recipe: Recipe, command: tuple[str, ...]) -> tuple[str, ...]:
    """Return an engine's command that first makes the directory of its disk tier; unchanged without a tier."""
    size = round(recipe.engine.memory.kv_offload_disk_gib * (1 << 30))
    if not size:
        return command
    flags = ("--limit-bytes", str(size), "--place", _DISK)
    return tuple(module_command("{python}", "hpcrl.inference.vllm.disk_tier", *flags, "--", *command))


def side_ports(recipe: Recipe, *, gpus: bool, ranks_per_node: int) -> int:
    """Return the number of ports that each node of a side needs for this, above those of its servers."""
    if recipe.engine.backend == "embedded":
        return 0
    return {None: 0, "mooncake": 1, "nixl": ranks_per_node}[connector(recipe, gpus=gpus)]


def side_command(
    recipe: Recipe, command: tuple[str, ...], *, gpus: bool, offset: int, ranks_per_node: int, nodes: int
) -> tuple[str, ...]:
    """Return an engine's command that first publishes where this node's KV can be fetched; unchanged without two sides.

    Parameters
    ----------
    command:
        Command of the engine.
    offset:
        Distance of the first of its `side_ports` above ``{port}``.
    ranks_per_node, nodes:
        Shape of a replica.
    """
    kind = connector(recipe, gpus=gpus)
    if kind is None:
        return command
    before = f"{{node_rank*{ranks_per_node}}}" if nodes > 1 else "0"
    flags = ("--connector", kind, "--towards", "{host}", "--port", f"{{port+{offset}}}", "--ranks-before", before)
    return tuple(module_command("{python}", "hpcrl.inference.vllm.side", *flags, "--", *command))


def front_command(recipe: Recipe, command: tuple[str, ...], *, gpus: bool, offset: int) -> tuple[str, ...]:
    """Return the router's command for requests from prefill to decode; unchanged without the two sides."""
    kind = connector(recipe, gpus=gpus)
    if kind is None:
        return command
    flags = ["--connector", kind]
    if kind == "mooncake":
        flags += ["--bootstrap-offset", str(offset)]
    return tuple(module_command("{python}", "hpcrl.inference.vllm.front", *flags, "--", *command))
