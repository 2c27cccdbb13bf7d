"""Command lines of the KV pool: its master, and how engines join it."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.kvstore import KvStoreConfig
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.jobplan.commands.kv_transfer import has_rdma
from hpcrl.processes.interpreter import module_command

STORE_PORTS = 3
"""For clients, for metadata of transfers, for health and metrics."""
_GIB = 1 << 30


def store_master_command(store: KvStoreConfig, etcd: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command of the role ``store``; ``etcd`` are the endpoints of a site that has one."""
    flags = {
        "--host": "{host}",
        "--port": "{port}",
        "--client-ttl-s": f"{store.client_ttl_s:g}",
        "--lease-ttl-s": f"{store.lease_ttl_s:g}",
        "--eviction-high-watermark": f"{store.eviction_high_watermark:g}",
        "--eviction-ratio": f"{store.eviction_ratio:g}",
    }
    if etcd:
        flags["--etcd"] = ";".join(etcd)
    words = (word for flag in flags.items() for word in flag)
    return tuple(module_command("{python}", "hpcrl.store.master", *words, *(["--disk"] if store.disk_gib else [])))


def join_command(
    recipe: Recipe,
    cluster: ClusterProfile,
    role: Role,
    command: tuple[str, ...],
    *,
    nodes: int,
    ranks_per_node: int,
) -> tuple[str, ...]:
    """Return an engine's command that first verifies that its node can use the pool; unchanged without a pool.

    Parameters
    ----------
    command:
        Command of the engine.
    nodes, ranks_per_node:
        Shape of a replica; the ranks of a node share its segment evenly.
    """
    store = recipe.engine.kv_store
    if store is None:
        return command
    node = cluster.node_of(role)
    rdma = store.protocol == "rdma" or (store.protocol == "auto" and has_rdma(cluster, role))
    flags = {
        "--protocol": "rdma" if rdma else "tcp",
        "--segment-bytes": str(int(store.segment_gib * _GIB) // ranks_per_node),
        "--local-buffer-bytes": str(int(store.local_buffer_gib * _GIB)),
    }
    if rdma and node is not None and node.nics:
        flags["--devices"] = ",".join(nic.name for nic in node.nics)
    flags |= {"--node": "{node_rank}", "--host": "{node_host}"} if nodes > 1 else {"--host": "{host}"}
    words = (word for flag in flags.items() for word in flag)
    disk = ["--disk"] if store.disk_gib else []
    return tuple(module_command("{python}", "hpcrl.store.join", *words, *disk, "--", *command))
