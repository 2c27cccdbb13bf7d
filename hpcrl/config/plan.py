"""The plan: a recipe on a cluster, resolved. Pure data; written to ``plan.json`` and read by the supervisor."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from hpcrl.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel
from hpcrl.config.layout import AttemptPolicy, Container, ElasticPolicy, JobComponent, Layout
from hpcrl.config.outlets import NotifierConfig, SinkConfig


class Role(StrEnum):
    """Purpose of a process (docs: words)."""

    TRAINER = "trainer"
    ENGINE = "engine"
    PREFILL = "prefill"
    DECODE = "decode"
    ORCHESTRATOR = "orchestrator"
    STORE = "store"
    ROUTER = "router"
    ENV = "env"


class HttpProbe(StrictModel):
    """Ready when ``GET path`` on the replica's port answers 200."""

    kind: Literal["http"] = "http"
    path: str


class FileProbe(StrictModel):
    """Ready when the replica has written its ready file (`hpcrl.runs.role.RoleContext.ready`)."""

    kind: Literal["file"] = "file"


class RolePolicy(StrictModel):
    """Consequences of the end of a replica for the run."""

    ends_run: bool = False
    """A clean end (exit code 0) of this role ends the run with success."""
    drain_order: NonNegativeInt = 0
    """Roles are asked to stop in rising order; a role is asked when all before it are gone."""
    stop_timeout_s: PositiveFloat
    """Time between SIGTERM and SIGKILL in seconds."""
    critical: bool = True
    """The run ends when a replica is lost for good; else when the last one is."""
    restart: Literal["never", "on-failure"] = "never"
    """Whether a replica that failed is started again in its place."""
    max_restarts: NonNegativeInt = 0
    """Restarts of a replica within the window."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds for which a restart counts."""


class WatchPolicy(StrictModel):
    """Conditions under which a running replica that makes no progress counts as hung."""

    floor_s: PositiveFloat = 60.0
    """Minimum seconds without progress before a replica counts as hung; one that does not answer counts just after
    these."""
    ceiling_s: PositiveFloat = 1800.0
    """Never later; also the limit of what was not measured yet."""
    update_timeout_s: NonNegativeFloat = 0.0
    """Longest weight update: tokens may stand still in an engine that long."""


class NodeShare(StrictModel):
    """Share of one replica in a node that it has not alone: trainer and engines, or several workers of environments."""

    cpus: PositiveInt
    gpus: NonNegativeInt
    first_gpu: NonNegativeInt = 0
    """Number of the first GPU of the group's first replica; those of the next follow."""

    memory_gib: PositiveFloat | None = None
    """Maximum memory of the replica; None: that of the job."""
    same: bool = False
    """The replicas of another role have the same CPUs and GPUs at the same time."""

    @property
    def text(self) -> str:
        """Return a text like ``4 GPUs and 84 CPUs``."""
        counts = [(self.gpus, "GPU"), (self.cpus, "CPU")]
        shared = "shared " if self.same else ""
        return " and ".join(f"{count} {shared}{what}{'' if count == 1 else 's'}" for count, what in counts if count)

    def gpus_of(self, replica: int) -> range:
        """Return the node's numbers of a replica's GPUs; where Slurm assigns them, it may choose others."""
        begin = self.first_gpu + replica * self.gpus
        return range(begin, begin + self.gpus)


class RoleGroup(StrictModel):
    """The replicas of one role.

    ``command`` holds placeholders that the supervisor fills for each replica: ``{python}``, ``{run_dir}``,
    ``{replica}``, ``{host}``, ``{port}`` (the replica's own; ``{host}`` is the first of its nodes), and ``{port+N}``,
    the port that lies ``N`` above. The command of a replica of several nodes may also hold ``{node_rank}``, the index
    of the node in the replica, ``{node_rank*N}``, ``{M-node_rank*N}`` (``M`` may be ``{port+K}``), and ``{node_host}``,
    the address of the node: they are known only on the node, from ``SLURM_NODEID`` of the step. The value of a variable
    of ``env`` may be ``{node_host}``, too, or ``{node_interface}``, the network interface with that address.
    """

    # plans of earlier runs have `tasks_per_node`, too
    model_config = ConfigDict(extra="ignore")

    role: Role
    replicas: PositiveInt
    ranks: PositiveInt
    """Processes of one replica (ranks of a trainer), over all of its nodes. Slurm starts one on each node, which starts
    the others there."""
    nodes: PositiveInt = 1
    """Nodes of one replica."""
    component: NonNegativeInt = 0
    """Index of the layout's component with the nodes."""
    first_node: NonNegativeInt = 0
    """Number of this group's first node in the node list of its component."""
    share: NodeShare | None = None
    """The part of one node that each replica has; None: its nodes are its own."""
    per_node: NonNegativeInt = 0
    """Replicas on each of the group's nodes. 0: each has nodes of its own, and those with a share have one together."""
    beside: bool = False
    """Runs on nodes of another group, without GPUs: its steps overlap with that group's."""
    command: tuple[str, ...]
    python: str | None = None
    """Value of ``{python}`` for this group; None: the plan's."""
    servers_per_node: NonNegativeInt = 0
    """HTTP servers of a replica on each of its nodes, one a rank, on neighbouring ports from ``{port}``. 0: the replica
    has one, on its first node, or none."""
    ports: PositiveInt = 1
    """Neighbouring ports that each node of a replica listens on; ``{port}`` is the first."""
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    """More variables: files with their values, read where the role starts."""
    after: tuple[Role, ...] = ()
    """Roles that must be ready before this one is started."""
    ready: Annotated[HttpProbe | FileProbe, Field(discriminator="kind")]
    start_timeout_s: PositiveFloat
    policy: RolePolicy

    @property
    def ranks_per_node(self) -> int:
        """Return the number of processes of a replica on each of its nodes."""
        return self.ranks // self.nodes


class Plan(StrictModel):
    """All that the supervisor needs."""

    format_version: Literal[1] = 1
    run: str
    """Name of the run."""
    recipe: str
    cluster: str
    run_dir: Path
    groups: tuple[RoleGroup, ...]
    first_port: PositiveInt
    last_port: PositiveInt
    time_limit_s: PositiveFloat
    layout: Layout = Layout()
    container: Container | None = None
    """Container in which roles run; None: the nodes as they are."""
    python: str | None = None
    """Interpreter of the roles; None: that of the supervisor."""
    attempts: AttemptPolicy = AttemptPolicy()
    elastic: ElasticPolicy = ElasticPolicy()
    """Read in the layout ``elastic`` only."""
    watch: WatchPolicy = WatchPolicy()
    scratch: str | None = None
    """Directory on each node for what roles leave between calls; None: ``$TMPDIR`` of the node."""
    sinks: Annotated[tuple[SinkConfig, ...], Field(strict=False)] = ()
    """Metric sinks, which receive the metrics of each step."""
    notify: Annotated[tuple[NotifierConfig, ...], Field(strict=False)] = ()
    """Notifiers, which send messages about events of the run."""

    def component(self, group: RoleGroup) -> JobComponent:
        """Return the component with a group's nodes (IndexError on this machine, which has none)."""
        return self.layout.components[group.component]

    def place(self, group: RoleGroup, replica: int) -> tuple[int, range]:
        """Return the job of the group's component that a replica is in, and its nodes in that job's node list."""
        if self.own_jobs(group):
            return replica, range(group.nodes)
        before = replica * group.nodes if group.share is None else 0
        if group.per_node:
            before = replica // group.per_node
        begin = group.first_node + before
        return 0, range(begin, begin + group.nodes)

    def own_jobs(self, group: RoleGroup) -> bool:
        """Return whether each replica of a group has its own job, which may be lost, or added during the run."""
        return self.layout.kind == "elastic" and not group.beside and group.component > 0

    def group(self, role: Role) -> RoleGroup:
        """Return the group of a role (KeyError where the plan has none)."""
        for group in self.groups:
            if group.role is role:
                return group
        raise KeyError(role)

    @property
    def processes(self) -> int:
        """Return the number of role processes, without launchers."""
        return sum(group.replicas * group.ranks for group in self.groups)
