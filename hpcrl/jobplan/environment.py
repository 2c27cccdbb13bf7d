"""The environment of roles, each variable with the place it comes from. Later sources win."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hpcrl.compile_caches import COMPILE_CACHES
from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.cluster_slurm import NicConfig, NodeConfig
from hpcrl.config.engine_shape import engine_gpus
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.jobplan.commands.router import ROUTER_VARIABLES
from hpcrl.jobplan.commands.vllm import vllm_variables
from hpcrl.processes.environment_marks import START_WEIGHTS_VARIABLE

_ENGINES = (Role.ENGINE, Role.PREFILL, Role.DECODE)
_WITHOUT_GPUS = (Role.ORCHESTRATOR, Role.STORE, Role.ROUTER, Role.ENV)
"""Roles without GPUs: they run where the trainer does, but for an orchestrator and workers that are placed apart."""


class EnvValue(NamedTuple):
    """A variable's value and its source: ``hpcrl``, or the key of the recipe or cluster profile."""

    value: str
    source: str


def role_variables(recipe: Recipe, cluster: ClusterProfile, role: Role, run_name: str) -> dict[str, EnvValue]:
    """Return the variables that the plan sets for a role, by name, each with its source (a key, or ``hpcrl``).

    Later sources take precedence: hpcrl's own values, values that follow from the node, the profile's values for all
    roles, and those for this role.
    """
    threads, key = recipe.engine.threads, "engine.threads"
    if role is Role.TRAINER:
        threads, key = recipe.trainer.threads, "trainer.threads"
    elif role in _WITHOUT_GPUS:
        threads, key = 1, "hpcrl"
    variables = {"OMP_NUM_THREADS": EnvValue(str(threads), key)}
    if role in _ENGINES and recipe.engine.backend == "vllm" and recipe.job.payload != "probe":
        variables |= _sourced(vllm_variables(recipe, gpus=engine_gpus(recipe, cluster, role) > 0), "hpcrl")
    if role in _ENGINES and recipe.job.payload == "evaluation":
        variables[START_WEIGHTS_VARIABLE] = EnvValue("1", "hpcrl")
    if role is Role.TRAINER and recipe.trainer.deterministic:
        # the buffer that is free decides the results of cuBLAS, unless there are as many buffers as streams
        variables["CUBLAS_WORKSPACE_CONFIG"] = EnvValue(":4096:8", "trainer.deterministic")
    if role is Role.ROUTER:
        variables |= _sourced(ROUTER_VARIABLES, "hpcrl")
    if isinstance(cluster, SlurmCluster):
        beside_trainer = role in (Role.STORE, Role.ROUTER)
        workers = recipe.environment_workers
        beside_trainer |= role is Role.ENV and workers is not None and not workers.apart
        first = Role.TRAINER
        if recipe.job.payload == "evaluation":  # without a trainer, roles are on the engines' nodes
            first = Role.ENGINE if recipe.engine.prefill is None else Role.PREFILL
            beside_trainer |= role is Role.ORCHESTRATOR and not cluster.orchestrator_apart
        partition = cluster.partition_name(first if beside_trainer else role)
        source = f"cluster.partitions.{partition}.node"
        node = cluster.partitions[partition].node
        if role is Role.TRAINER and node.gpus:
            # micro-batches differ in length: freed blocks of fixed sizes would fit ever fewer of the next ones
            variables["PYTORCH_CUDA_ALLOC_CONF"] = EnvValue("expandable_segments:True", "hpcrl")
        whole = not recipe.engine.shares_node
        variables |= _sourced(_network(node, role, whole=whole), source)
        variables |= _sourced(_caches(cluster, run_name), "cluster.paths")
    variables |= _sourced(cluster.env, "cluster.env")
    if isinstance(cluster, SlurmCluster):
        by_role = {str(name): env for name, env in cluster.env_by_role.items()}
        names = ("engine", role.value) if role in (Role.PREFILL, Role.DECODE) else (role.value,)
        for name in names:
            variables |= _sourced(by_role.get(name, {}), f"cluster.env_by_role.{name}")
    return variables


def network_variables(cluster: SlurmCluster, partition: str) -> dict[str, str]:
    """Return the network variables of a trainer's ranks on nodes of a partition; the profile's values take precedence.

    ``{node_interface}`` and ``{node_host}`` in values are filled on each node.
    """
    by_role = {str(name): env for name, env in cluster.env_by_role.items()}
    node = cluster.partitions[partition].node
    return {**_network(node, Role.TRAINER, whole=True), **cluster.env, **by_role.get("trainer", {})}


def plain(variables: Mapping[str, EnvValue]) -> dict[str, str]:
    """Give the values of the variables without where they come from."""
    return {name: value for name, (value, _) in variables.items()}


def _sourced(values: Mapping[str, str], source: str) -> dict[str, EnvValue]:
    return {name: EnvValue(value, source) for name, value in values.items()}


def _caches(cluster: SlurmCluster, run_name: str) -> dict[str, str]:
    """Return the variables of caches.

    Downloads are shared; compile caches are not: several nodes that write one on NFS corrupt each other's files.
    """
    variables = {}
    if cluster.paths.cache is not None:
        variables["HF_HOME"] = f"{cluster.paths.cache}/huggingface"
    if cluster.paths.scratch is not None:
        scratch = f"{cluster.paths.scratch}/hpcrl-{run_name}"
        variables |= {name: f"{scratch}/{directory}" for name, directory in COMPILE_CACHES.items()}
    return variables


def _network(node: NodeConfig, role: Role, *, whole: bool) -> dict[str, str]:
    """Return the variables of NCCL, Gloo, NVSHMEM and UCX for a node's network; ``whole``: with all its GPUs."""
    # by default Gloo uses the address of the node's own name, which is often 127.0.1.1
    variables = {"GLOO_SOCKET_IFNAME": node.interface or "{node_interface}"}
    if node.interface is not None:
        # "=": exactly this one, not every interface whose name begins like it
        variables["NCCL_SOCKET_IFNAME"] = f"={node.interface}"
    if role in _WITHOUT_GPUS or not node.gpus:
        return variables
    if node.fabric.kind == "ethernet":
        return {**variables, "NCCL_IB_DISABLE": "1"}
    if node.nics:
        variables["NCCL_IB_HCA"] = "=" + ",".join(f"{nic.name}:{nic.port}" for nic in node.nics)
        variables |= _nvshmem(node, whole=whole)
        if role in _ENGINES:
            variables["UCX_NET_DEVICES"] = ",".join(f"{nic.name}:{nic.port}" for nic in node.nics)
    for setting, value in (("GID_INDEX", node.fabric.gid_index), ("TC", node.fabric.traffic_class)):
        if value is not None:
            variables[f"NCCL_IB_{setting}"] = str(value)
            variables[f"NVSHMEM_IB_{'TRAFFIC_CLASS' if setting == 'TC' else setting}"] = str(value)
            if role in _ENGINES:
                variables[f"UCX_IB_{'TRAFFIC_CLASS' if setting == 'TC' else setting}"] = str(value)
    return variables


def _nvshmem(node: NodeConfig, *, whole: bool) -> dict[str, str]:
    """Return the variables of NVSHMEM: an adapter for each local rank, in the order of ranks: ``name:port:ranks``."""
    nearest: dict[int, NicConfig] = {gpu: nic for nic in node.nics for gpu in nic.gpus}
    if whole and sorted(nearest) == list(range(node.gpus)):
        mapping = ",".join(f"{nearest[gpu].name}:{nearest[gpu].port}:1" for gpu in range(node.gpus))
        return {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1", "NVSHMEM_HCA_PE_MAPPING": mapping}
    return {"NVSHMEM_HCA_LIST": ",".join(f"{nic.name}:{nic.port}" for nic in node.nics)}
