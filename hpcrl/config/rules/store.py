"""Rules about Mooncake: the KV pool that engines share, and weights over the fabric."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule


def _fits_host(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    store = recipe.engine.kv_store
    if store is None or not isinstance(cluster, SlurmCluster):
        return
    for role in ("prefill", "decode") if recipe.engine.prefill is not None else ("engine",):
        node = cluster.node_of(role)
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
    if cluster.scratch is None:
        yield "engine.kv_store.disk_gib", "the site names no scratch directory on the disks of its nodes"


def _rdma_is_there(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    store = recipe.engine.kv_store
    warehouse = recipe.rollouts.warehouse
    wanted = []
    if store is not None and store.protocol == "rdma":
        wanted.append(("engine.kv_store.protocol", "decode" if recipe.engine.decode is not None else "engine"))
    if warehouse.backend == "mooncake" and warehouse.protocol == "rdma":
        wanted.append(("rollouts.warehouse.protocol", "trainer"))
    if recipe.handoff.transport == "fabric" and recipe.handoff.fabric_protocol == "rdma":
        engine = "decode" if recipe.engine.decode is not None else "engine"
        # a local run has one answer for both
        roles = ("trainer", engine) if isinstance(cluster, SlurmCluster) else ("trainer",)
        wanted += [("handoff.fabric_protocol", role) for role in roles]
    for key, role in wanted:
        if not isinstance(cluster, SlurmCluster):
            yield key, "a local run has no network adapters for RDMA"
        elif cluster.node_of(role).fabric.kind == "ethernet":
            yield key, f"the nodes of {role} have plain Ethernet"


def _fabric_serves_an_image(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    handoff = recipe.handoff
    if handoff.transport == "fabric" and not (handoff.overlap or handoff.delta_chain):
        yield "handoff.overlap", "ranks serve a version from a whole copy, which only this setting makes"


def _memory_suffices(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    handoff = recipe.handoff
    if handoff.durable_every > 1 and handoff.transport != "fabric":
        yield "handoff.durable_every", "engines read every version from the shared filesystem"
    elif handoff.durable_every > 1 and handoff.delta_chain:
        yield "handoff.delta_chain", "the parent of a delta must be a version that every reader can have"


STORE_RULES: tuple[Rule, ...] = (
    Rule("store-fits-host", "The KV pool fits into the memory of engine nodes.", "lower segment_gib", _fits_host),
    Rule(
        "store-disk-place",
        "The disk tier of the KV pool has a scratch directory.",
        "set paths.scratch of the site, or disk_gib: 0",
        _disk_has_place,
    ),
    Rule("store-rdma", "RDMA needs RDMA adapters.", "set protocol: tcp", _rdma_is_there),
    Rule(
        "fabric-image",
        "A version that is served over the fabric is copied as a whole.",
        "set handoff.overlap: true, or handoff.transport: share",
        _fabric_serves_an_image,
    ),
    Rule(
        "fabric-durable",
        "A version that is not written to the shared filesystem is whole, and served over the fabric.",
        "set handoff.durable_every: 1, or handoff.transport: fabric without handoff.delta_chain",
        _memory_suffices,
    ),
)
