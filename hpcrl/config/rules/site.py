"""Rules within a cluster profile, which need no recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.cluster_slurm import NoContainer
from hpcrl.config.rules.rule import Conflicts, SiteRule

OWNED_VARIABLES: dict[str, str] = {
    "HPCRL_": "hpcrl uses it to identify roles",
    "SLURM_": "Slurm sets it for each job and step",
    "SBATCH_": "it would silently override the script that hpcrl renders",
    "SRUN_": "it would silently override how hpcrl starts steps",
    "SUBMITIT_": "submitit sets it for the supervisor",
    "CUDA_VISIBLE_DEVICES": "Slurm sets it from the GPUs of the job",
    "RANK": "it differs by process: the launcher sets it",
    "LOCAL_RANK": "it differs by process: the launcher sets it",
    "WORLD_SIZE": "it follows from the plan: the launcher sets it",
    "LOCAL_WORLD_SIZE": "it follows from the plan: the launcher sets it",
    "MASTER_ADDR": "it is a node of the job: the supervisor chooses it",
    "MASTER_PORT": "ports are chosen by the supervisor when the job starts",
    "VLLM_HOST_IP": "it differs by node",
    "VLLM_PORT": "ports are chosen by the supervisor when the job starts",
}
"""Variables that a profile may not set, with the reason. A name that ends in ``_`` stands for all that begin so."""


def _of_slurm(check: Callable[[SlurmCluster], Conflicts]) -> Callable[[ClusterProfile], Conflicts]:
    """Return the check of a rule about sites with Slurm, for profiles of every kind."""

    def check_profile(cluster: ClusterProfile) -> Conflicts:
        if isinstance(cluster, SlurmCluster):
            yield from check(cluster)

    return check_profile


def _owned(name: str) -> str | None:
    for owned, reason in OWNED_VARIABLES.items():
        if name == owned or (owned.endswith("_") and name.startswith(owned)):
            return reason
    return None


def _variables(cluster: ClusterProfile) -> Iterator[tuple[str, str]]:
    yield from ((f"cluster.env.{name}", name) for name in cluster.env)
    yield from ((f"cluster.secrets.{name}", name) for name in cluster.secrets)
    if isinstance(cluster, SlurmCluster):
        for role, env in cluster.env_by_role.items():
            yield from ((f"cluster.env_by_role.{role}.{name}", name) for name in env)


def _owned_variables(cluster: ClusterProfile) -> Conflicts:
    for key, name in _variables(cluster):
        if reason := _owned(name):
            yield key, f"is not for profiles: {reason}"
    if isinstance(cluster, SlurmCluster):
        for i, name in enumerate(cluster.launch.inherit):
            if reason := _owned(name):
                yield f"cluster.launch.inherit.{i}", f"{name} is not for profiles: {reason}"


def _variable_names(cluster: ClusterProfile) -> Conflicts:
    for key, name in _variables(cluster):
        if not name.isidentifier() or not name.isascii():
            yield key, f"{name!r} is not a name of a variable"


@_of_slurm
def _known_partitions(cluster: SlurmCluster) -> Conflicts:
    named = [("default", cluster.placement.default)]
    named += [(f"by_role.{role}", name) for role, name in cluster.placement.by_role.items()]
    for key, name in named:
        if name not in cluster.partitions:
            known = ", ".join(cluster.partitions)
            yield f"cluster.placement.{key}", f"{name!r} is not a partition of this profile ({known})"


@_of_slurm
def _gpus_without_gres(cluster: SlurmCluster) -> Conflicts:
    if cluster.gres == "none" and not cluster.capabilities.exclusive:
        yield "cluster.gres", "Slurm gives out no GPUs and no whole nodes: two runs could get the same GPU"


@_of_slurm
def _nics(cluster: SlurmCluster) -> Conflicts:
    for name, partition in cluster.partitions.items():
        seen: set[tuple[str, int]] = set()
        taken: set[int] = set()
        for i, nic in enumerate(partition.node.nics):
            key = f"cluster.partitions.{name}.node.nics.{i}"
            if (nic.name, nic.port) in seen:
                yield f"{key}.name", f"port {nic.port} of {nic.name} appears twice"
            seen.add((nic.name, nic.port))
            for gpu in nic.gpus:
                if gpu >= partition.node.gpus:
                    yield f"{key}.gpus", f"there is no GPU {gpu}: the node has {partition.node.gpus}, counted from 0"
                elif gpu in taken:
                    yield f"{key}.gpus", f"GPU {gpu} has a nearest adapter already"
                taken.add(gpu)


@_of_slurm
def _fabric(cluster: SlurmCluster) -> Conflicts:
    for name, partition in cluster.partitions.items():
        fabric, key = partition.node.fabric, f"cluster.partitions.{name}.node.fabric"
        if fabric.kind == "roce" and fabric.gid_index is None:
            yield f"{key}.gid_index", "RoCE needs it: the first entries of the GID table are not routable"
        if fabric.kind != "roce":
            for setting in ("gid_index", "traffic_class"):
                if getattr(fabric, setting) is not None:
                    yield f"{key}.{setting}", f"has no effect on {fabric.kind}"
        if fabric.kind == "ethernet" and partition.node.nics:
            yield f"cluster.partitions.{name}.node.nics", "an ethernet fabric has no RDMA adapters"


@_of_slurm
def _segment(cluster: SlurmCluster) -> Conflicts:
    if not cluster.capabilities.segment:
        for name, partition in cluster.partitions.items():
            if partition.block_nodes is not None:
                yield f"cluster.partitions.{name}.block_nodes", "this Slurm has no --segment (capabilities.segment)"


@_of_slurm
def _modules(cluster: SlurmCluster) -> Conflicts:
    if cluster.launch.modules and cluster.launch.module_init is None:
        yield "cluster.launch.modules", "jobs start with a clean environment, in which `module` is not defined"


@_of_slurm
def _mounts(cluster: SlurmCluster) -> Conflicts:
    if isinstance(cluster.container, NoContainer):
        return
    for i, mount in enumerate(cluster.container.mounts):
        parts = mount.split(":")
        good = len(parts) == 2 or (len(parts) == 3 and parts[2] in ("ro", "rw"))
        if not good or "," in mount or not all(part.startswith("/") for part in parts[:2]):
            yield f"cluster.container.mounts.{i}", f"{mount!r} is not /SOURCE:/TARGET or /SOURCE:/TARGET:ro"


@_of_slurm
def _paths(cluster: SlurmCluster) -> Conflicts:
    paths = cluster.paths
    if paths.scratch and PurePosixPath(paths.runs_root).is_relative_to(paths.scratch):
        yield "cluster.paths.runs_root", f"lies in scratch ({paths.scratch}), which each node has for itself"
    for name, path in (("runs_root", paths.runs_root), ("cache", paths.cache), ("scratch", paths.scratch)):
        # a backslash in a file name is special to Slurm; colon and comma are separators of containers
        if bad := [sign for sign in "\n\\:," if sign in (path or "")]:
            yield f"cluster.paths.{name}", f"{path!r} holds {bad[0]!r}, which Slurm or containers cannot pass on"


def _port_order(cluster: ClusterProfile) -> Conflicts:
    if cluster.ports.last < cluster.ports.first:
        yield "cluster.ports.last", f"{cluster.ports.last} is below first ({cluster.ports.first})"


@_of_slurm
def _time(cluster: SlurmCluster) -> Conflicts:
    if cluster.limits.save_timeout_s >= cluster.limits.time_limit_h * 3600:
        yield "cluster.limits.save_timeout_s", f"leaves no time to train in {cluster.limits.time_limit_h:g} h"


SITE_RULES: tuple[SiteRule, ...] = (
    SiteRule(
        "owned-variables",
        "A profile sets no variable that hpcrl, Slurm or the launcher sets.",
        "remove it",
        _owned_variables,
    ),
    SiteRule("variable-names", "Environment variables have names that a shell can set.", "rename it", _variable_names),
    SiteRule("known-partitions", "Placement names partitions of the profile.", "name one of them", _known_partitions),
    SiteRule(
        "gpus-are-given-out",
        "Jobs ask for GPUs or for whole nodes.",
        "choose gres: gres or gpus_per_node, or allow capabilities.exclusive",
        _gpus_without_gres,
    ),
    SiteRule(
        "nic-affinity",
        "Adapters are listed once, and every GPU has at most one nearest adapter.",
        "correct the list (`nvidia-smi topo -m` on a compute node shows it)",
        _nics,
    ),
    SiteRule(
        "fabric-settings",
        "Settings of the fabric fit its kind.",
        "correct fabric (`show_gids` on a compute node lists GIDs)",
        _fabric,
    ),
    SiteRule(
        "segment-capability",
        "Blocks are used only where Slurm knows --segment.",
        "remove block_nodes, or set capabilities.segment if Slurm is 24.05 or later with topology/block",
        _segment,
    ),
    SiteRule(
        "module-command",
        "Modules can be loaded.",
        "set launch.module_init to the file that defines `module`",
        _modules,
    ),
    SiteRule("mount-form", "Mounts have the form that containers take.", "write absolute paths", _mounts),
    SiteRule(
        "passable-paths",
        "Directories can be passed on to Slurm, and the runs root is shared.",
        "choose another directory",
        _paths,
    ),
    SiteRule("port-order", "ports.first is not above ports.last.", "swap ports.first and ports.last", _port_order),
    SiteRule(
        "time-to-save",
        "Saving takes less than the time limit.",
        "lower limits.save_timeout_s or raise limits.time_limit_h",
        _time,
    ),
)
