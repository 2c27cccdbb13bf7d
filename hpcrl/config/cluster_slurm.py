"""The profile of a Slurm site. Every field is documented here; docs/configuration.md is made from it."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from hpcrl.config.base import (
    Name,
    NodeRole,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rate,
    RoleName,
    SlurmWord,
    StrictModel,
)
from hpcrl.config.cluster_base import ClusterBase, LimitsConfig, PathsConfig


class SlurmPathsConfig(PathsConfig):
    """Directories. ``~`` and ``$NAME`` are expanded where hpcrl is called; relative ones start there."""

    cache: str | None = None
    """Shared directory for downloads (Hugging Face); visible from all nodes. None: what the tools choose."""
    scratch: str | None = None
    """Directory on a disk of each node, for all compile caches of single runs (docs/admins.md lists them). None: what
    the tools choose, mostly the home directory."""
    tables: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Files of kernel times that `hpcrl plan profile` measured on this site; the last one counts for what it has."""


SIGNAL_EARLY_S = 60
"""Slurm looks for jobs to signal once a minute: a warning may come so much before it was asked for, in seconds."""


class SlurmLimitsConfig(LimitsConfig):
    """Deadlines that depend on the site."""

    save_timeout_s: PositiveFloat = 600.0
    """Longest save of a checkpoint in seconds. Slurm's signal before the time limit comes this long, and a minute,
    before it."""

    @property
    def signal_lead_s(self) -> int:
        """Return the seconds before the time limit at which Slurm sends its signal: a save and one minute."""
        return math.ceil(self.save_timeout_s) + 60


class ReliabilityConfig(StrictModel):
    """Measured failures and waits of the site. Read by the planner only, for ``job.spare_nodes``."""

    node_mtbf_h: PositiveFloat | None = None
    """Mean time between failures of one node, in hours. None: 6300 is assumed."""
    queue_wait_h: NonNegativeFloat | None = None
    """Hours that a run waits in the queue after a requeue. None: 1 is assumed."""


class NicConfig(StrictModel):
    """One network adapter that GPUs talk through; leave out those of storage and management."""

    name: SlurmWord
    """Name as ``ibv_devices`` shows it, for example ``mlx5_0``."""
    port: PositiveInt = 1
    """Port of the adapter."""
    gpus: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = ()
    """GPUs that are nearest to it (``nvidia-smi topo -m``), counted from 0. Empty: libraries find it out."""
    gb_s: Rate | None = None
    """Rate in GB/s (10^9 bytes) each way: 50 for a 400 Gb/s adapter. Read by the planner, and by
    ``hpcrl cluster check --job``, which compares it with what nodes reach."""


class GpuConfig(StrictModel):
    """Facts about a GPU that the planner needs. Without a number, a plan that needs it names the missing one."""

    memory_gib: PositiveFloat | None = None
    """Memory in GiB, as ``nvidia-smi`` shows it in MiB / 1024."""
    memory_gb_s: Rate | None = None
    """Bandwidth of that memory in GB/s."""
    tflops: dict[Literal["float32", "bfloat16", "fp8"], Rate] = {}
    """Peak 10^12 operations a second by dtype, dense (data sheets often print the number with sparsity, which is
    twice as much)."""
    nvlink_gb_s: Rate | None = None
    """Rate to the other GPUs of the node in GB/s each way (half of what data sheets print). None: no NVLink."""
    pcie_gb_s: Rate | None = None
    """Rate between host memory and one GPU in GB/s each way."""


class FilesystemConfig(StrictModel):
    """The shared filesystem that holds ``paths.runs_root``, as measured (``fio``, IOR). Read by the planner only."""

    read_gb_s: Rate | None = None
    """All nodes together reading, in GB/s."""
    write_gb_s: Rate | None = None
    """All nodes together writing, in GB/s."""
    node_read_gb_s: Rate | None = None
    """One node reading, in GB/s."""
    node_write_gb_s: Rate | None = None
    """One node writing, in GB/s."""


class FabricConfig(StrictModel):
    """The network between GPUs of different nodes."""

    kind: Literal["infiniband", "roce", "ethernet"]
    """``ethernet``: no RDMA; libraries are configured not to look for it."""
    gid_index: NonNegativeInt | None = None
    """``roce``: entry of the GID table with the RoCE v2 address (``show_gids``)."""
    traffic_class: NonNegativeInt | None = None
    """``roce``: traffic class that the switches treat as lossless."""


class NodeConfig(StrictModel):
    """Shape of a node. Nothing here has a default: hpcrl does not guess hardware."""

    gpus: NonNegativeInt
    """GPUs; 0 for a partition without."""
    gpu_type: SlurmWord | None = None
    """Type in Slurm's ``Gres=gpu:TYPE:N``, lower or upper case as there. None: the site has no types."""
    cpus: PositiveInt
    """CPUs as Slurm counts them (``CPUTot`` of ``scontrol show node``)."""
    memory_gib: PositiveFloat
    """Memory in GiB (``RealMemory`` / 1024)."""
    nics: Annotated[tuple[NicConfig, ...], Field(strict=False)] = ()
    """Adapters that GPUs talk through."""
    fabric: FabricConfig
    """The network between GPUs of different nodes."""
    interface: SlurmWord | None = None
    """Network interface that servers of a run listen on, and that TCP between nodes goes over (``ip -br address``).
    None: each node's address as the batch node sees it, never loopback."""
    gpu: GpuConfig = GpuConfig()
    """Memory and rates of a GPU."""
    memory_gb_s: Rate | None = None
    """Bandwidth of the host memory of a node in GB/s."""


class PartitionConfig(StrictModel):
    """A partition and how jobs are sent to it."""

    nodes: PositiveInt
    """Nodes that a run may take."""
    node: NodeConfig
    """Shape of each of them."""
    max_time_h: PositiveFloat | None = None
    """Longest job in hours. None: the partition has no limit."""
    account: SlurmWord | None = None
    """Account to charge."""
    qos: SlurmWord | None = None
    """Quality of service."""
    reservation: SlurmWord | None = None
    """Reservation to run in."""
    constraint: SlurmWord | None = None
    """Features that nodes must have."""
    block_nodes: PositiveInt | None = None
    """Nodes of a block in Slurm's block topology. Where set, jobs ask for whole segments (``--segment``)."""


class PlacementConfig(StrictModel):
    """Partition of each role."""

    default: str
    """Partition of all roles that ``by_role`` does not name."""
    by_role: dict[NodeRole, str] = {}
    """Partition by role; ``engine`` is also for ``prefill`` and ``decode`` where these are not named. With
    ``orchestrator`` that has a node of its own there, which needs no GPUs; else it runs on the trainer's first node.
    ``env`` is for workers of environments with nodes of their own (``environment_workers`` of a recipe)."""


class LaunchConfig(StrictModel):
    """The environment of a job. It starts clean: of the submitter's variables only login and locale are kept."""

    inherit: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], ...], Field(strict=False)] = ()
    """Variables of the submitter that jobs get as well, for example ``HF_TOKEN``."""
    path: Annotated[tuple[Annotated[str, Field(pattern=r"^/[^:\n]*$")], ...], Field(strict=False)] = ()
    """Directories before the system's own in ``PATH``, for example ``/opt/slurm/bin``: ``srun`` must be found."""
    module_init: str | None = None
    """File that defines the ``module`` command, for example ``/etc/profile.d/lmod.sh``."""
    modules: Annotated[tuple[SlurmWord, ...], Field(strict=False)] = ()
    """Modules to load before the supervisor starts."""


class NoContainer(StrictModel):
    """Roles run on the nodes as they are."""

    kind: Literal["none"] = "none"
    """No container."""


class _Container(StrictModel):
    image: str
    """Image: a path that all nodes see, or a reference that the runtime can fetch."""
    python: str = "python3"
    """Interpreter in the image; hpcrl must be installed for it."""
    mounts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``. Runs root, caches, scratch and the start model are always mounted."""
    mount_home: bool = False
    """Mount the home directory. Without, ``~`` on the node and in the container differ."""


class PyxisContainer(_Container):
    """Roles run in containers of pyxis and enroot (``srun --container-image``)."""

    kind: Literal["pyxis"]
    """Containers by the pyxis plugin."""


class ApptainerContainer(_Container):
    """Roles run in containers of Apptainer."""

    kind: Literal["apptainer"]
    """Containers by ``apptainer exec``."""


ContainerConfig = Annotated[NoContainer | PyxisContainer | ApptainerContainer, Field(discriminator="kind")]


class CapabilitiesConfig(StrictModel):
    """Features of this Slurm. ``hpcrl cluster init`` finds them out, ``hpcrl cluster check`` compares them."""

    hetjob: bool
    """Heterogeneous jobs are accepted (``SchedulerType=sched/backfill``)."""
    exclusive: bool
    """Jobs may ask for whole nodes (``--exclusive``). Without, CPUs and memory of a node are asked for by number."""
    requeue: bool
    """Jobs may be requeued (``JobRequeue``, not forbidden by the partition)."""
    scontrol_on_nodes: bool
    """Compute nodes can run ``scontrol``: a run can requeue itself."""
    accounting: bool
    """There is a Slurm database (``sacct`` answers)."""
    segment: bool = False
    """``sbatch`` knows ``--segment`` (Slurm 24.05 and later with ``topology/block``)."""


class SlurmCluster(ClusterBase):
    """A site with Slurm."""

    kind: Literal["slurm"]
    """``slurm``: runs are jobs of the site's Slurm."""
    paths: SlurmPathsConfig
    """Directories."""
    limits: SlurmLimitsConfig = SlurmLimitsConfig()
    """Timeouts and time limits."""
    filesystem: FilesystemConfig = FilesystemConfig()
    """Rates of the shared filesystem."""
    reliability: ReliabilityConfig = ReliabilityConfig()
    """Failures of nodes, and waits in the queue."""
    partitions: Annotated[dict[Name, PartitionConfig], Field(min_length=1)]
    """Partitions by name."""
    placement: PlacementConfig
    """Partition of each role."""
    gres: Literal["gres", "gpus_per_node", "none"]
    """Option by which jobs request GPUs: ``--gres=gpu:TYPE:N``, ``--gpus-per-node=TYPE:N``, or not at all (Slurm does
    not know of them; needs ``capabilities.exclusive``)."""
    capabilities: CapabilitiesConfig
    """Features of this Slurm."""
    launch: LaunchConfig = LaunchConfig()
    """The environment of a job."""
    env_by_role: dict[RoleName, dict[str, str]] = {}
    """Environment variables by role, on top of ``env``; those of ``engine`` are also for ``prefill`` and ``decode``."""
    container: ContainerConfig = NoContainer()
    """Containers for roles. The supervisor itself always runs on the node."""

    @property
    def uses_slurm(self) -> bool:
        """Return whether runs are jobs of Slurm, on other machines."""
        return True

    @property
    def scratch(self) -> str | None:
        """Return the directory on a disk of each node; None where the profile names none."""
        return self.paths.scratch

    def node_of(self, role: str) -> NodeConfig:
        """Return the nodes of a role, as the profile describes them."""
        return self.partitions[self.partition_name(role)].node

    def partition_name(self, role: str) -> str:
        """Return the partition of a role that has nodes of its own."""
        by_role = {str(key): name for key, name in self.placement.by_role.items()}
        if role in ("prefill", "decode"):
            return by_role.get(role) or by_role.get("engine") or self.placement.default
        if role == "orchestrator" and role not in by_role:
            return self.partition_name("trainer")
        return by_role.get(role) or self.placement.default

    @property
    def orchestrator_apart(self) -> bool:
        """Return whether the orchestrator has its own node, in another partition than the trainer."""
        return self.partition_name("orchestrator") != self.partition_name("trainer")
