"""Rules about the KV pool that engines share."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule

__all__ = ["STORE_RULES"]


def _fits_host(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    store = recipe.engine.kv_store
    if store is None or not isinstance(cluster, SlurmCluster):
        return
    for role in ("prefill", "decode") if recipe.engine.prefill is not None else ("engine",):
        node = cluster.partitions[cluster.partition_name(role)].node
        buffers_gib = max(1, node.gpus) * store.local_buffer_gib
        if store.segment_gib + buffers_gib > node.memory_gib:
            what = (
                f"{store.segment_gib:g} GiB and {buffers_gib:g} GiB of buffers, a {role} node has {node.memory_gib:g}"
            )
            yield "engine.kv_store.segment_gib", what
            return


def _disk_has_place(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    store = recipe.engine.kv_store
    if store is None or not store.disk_gib:
        return
    if not isinstance(cluster, SlurmCluster) or cluster.paths.scratch is None:
        yield "engine.kv_store.disk_gib", "the site names no scratch directory on the disks of its nodes"


def _rdma_is_there(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    store = recipe.engine.kv_store
    warehouse = recipe.rollouts.warehouse
    wanted = []
    if store is not None and store.protocol == "rdma":
        wanted.append(("engine.kv_store.protocol", "decode" if recipe.engine.decode is not None else "engine"))
    if warehouse.backend == "mooncake" and warehouse.protocol == "rdma":
        wanted.append(("rollouts.warehouse.protocol", "trainer"))
    for key, role in wanted:
        if not isinstance(cluster, SlurmCluster):
            yield key, "a local run has no network adapters for RDMA"
        elif cluster.partitions[cluster.partition_name(role)].node.fabric.kind == "ethernet":
            yield key, f"the nodes of {role} have plain Ethernet"


STORE_RULES: tuple[Rule, ...] = (
    Rule("store-fits-host", "The KV pool fits into the memory of engine nodes.", "lower segment_gib", _fits_host),
    Rule(
        "store-disk-place",
        "The second tier has a disk.",
        "set paths.scratch of the site, or disk_gib: 0",
        _disk_has_place,
    ),
    Rule("store-rdma", "RDMA needs adapters that can.", "set protocol: tcp", _rdma_is_there),
)
