"""Jobs of a run: the section ``job`` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hpcrl.config.base import (
    NodeRole,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SlurmWord,
    StrictModel,
)

_ROLES = ("trainer", "engine", "prefill", "decode", "orchestrator", "env")


def _partitions(value: object) -> object:
    """Check one name or a map of roles to names.

    The check is here, because two types at once make two errors of one mistake.
    """
    names = list(value.values()) if isinstance(value, dict) else [value]
    if value is not None and not all(isinstance(name, str) and name for name in names):
        raise PydanticCustomError("partition", "must be the name of a partition, or a map of roles to names")
    if isinstance(value, dict) and (strange := [str(key) for key in value if key not in _ROLES]):
        known = ", ".join(_ROLES)
        raise PydanticCustomError(
            "partition", f"{', '.join(strange)} has no nodes of its own; roles that have are {known}"
        )
    return value


class JobConfig(StrictModel):
    """Jobs of the run on a Slurm site. A local run reads ``payload`` and the limits of attempts."""

    layout: Literal["auto", "hetjob", "single", "elastic"] = "auto"
    """``hetjob``: a heterogeneous job, one component a role; ``single``: one allocation, cut by node; ``elastic``:
    each engine is a job of its own, so that one can be lost or added. ``auto``: ``hetjob`` where roles differ in
    partition or number of nodes and the site can, else ``single``."""
    payload: Literal["roles", "probe", "evaluation"] = "roles"
    """``probe`` starts a small program in place of every rank: it reports its node, GPUs, ports and the lag of the
    filesystem. ``evaluation`` starts engines and an orchestrator without a trainer; ``hpcrl eval`` sets it."""
    account: SlurmWord | None = None
    """Account to charge. None: ``SBATCH_ACCOUNT`` or ``SLURM_ACCOUNT`` of the environment, else the profile's."""
    qos: SlurmWord | None = None
    """Quality of service. None: ``SBATCH_QOS`` or ``SLURM_QOS``, else the profile's."""
    reservation: SlurmWord | None = None
    """Reservation to run in. None: ``SBATCH_RESERVATION`` or ``SLURM_RESERVATION``, else the profile's."""
    partition: Annotated[str | dict[NodeRole, str] | None, BeforeValidator(_partitions)] = None
    """Partition of all roles; or a map of roles (``trainer``, ``engine``, ``prefill``, ``decode``, ``orchestrator``,
    ``env``) to partitions, over the profile's ``placement``. The profile must have them. An orchestrator whose
    partition is not the trainer's has a node of its own there; else it runs on the trainer's first node. None:
    ``SBATCH_PARTITION`` or ``SLURM_PARTITION``, for all roles, else the profile's."""
    sbatch_options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More options of sbatch, each as ``--name=value`` or ``--name``, for example ``--mail-type=END``. Those that hpcrl
    sets itself are refused, with the reason. Each job of the run gets them."""
    time_limit_h: PositiveFloat | None = None
    """Longest job in hours; with ``requeue`` the run continues in the next. None: the site's
    ``limits.time_limit_h``."""
    requeue: Literal["auto", "always", "never"] = "auto"
    """Whether Slurm starts the job again after a node failure, a preemption or the time limit. ``auto``: where the
    site can."""
    max_attempts: PositiveInt = 20
    """Attempts of the run, the first included."""
    on_change: Literal["warn", "stop"] = "warn"
    """Action of an attempt that would run another hpcrl, Python, package or environment module than those of the submit
    or the last resume: warn and continue, or end with that as its cause (``resume --accept-changes``)."""
    max_attempts_without_progress: PositiveInt = 3
    """Attempts in a row that end without a new joint checkpoint; then the run is given up."""
    min_replicas: PositiveInt = 1
    """Layout ``elastic``: the run starts when this number of replicas of each inference role is ready; the others join
    when Slurm gives them nodes."""
    replica_wait_h: PositiveFloat = 2.0
    """Layout ``elastic``: longest time with fewer replicas than that before the start, or with none at all later, in
    hours; then the run ends."""
    replica_hold_h: PositiveFloat = 0.25
    """Layout ``elastic``: hours for which a replica's job keeps its nodes while the trainer's job waits in the queue;
    then it gives them back, and is submitted again when the trainer runs."""
    max_replica_resubmits: NonNegativeInt = 20
    """Layout ``elastic``: jobs of one replica that may end and be replaced in one attempt of the run."""
    retry_failures: NonNegativeInt | None = None
    """Maximum number of new attempts after failures of a role that is not restarted in place (a trainer rank that was
    killed). An attempt begins at once, in the same nodes, at the last joint checkpoint, and only if the attempt that
    failed has made one: an error that comes again at the same step ends the run. None: 3 under Slurm, 0 on this
    machine."""
    spare_nodes: dict[NodeRole, NonNegativeInt] = {}
    """More nodes to ask for than roles need, by role (``{trainer: 1, engine: 1}``), in the same job and partition. If a
    node goes down, the next attempt begins at once on the other nodes of the job, at the newest joint checkpoint,
    without the queue. A node that fails once is not used again in this job. When too few nodes are left, the run is
    requeued as without spare nodes. Layout ``elastic``: for ``trainer`` only, as each engine has its own job. Needs
    ``capabilities.scontrol_on_nodes`` of the profile, and in the layout ``hetjob`` two nodes or more in each component
    (docs/admins.md)."""
    exclude_failed_nodes_h: NonNegativeFloat = 24.0
    """Hours that later attempts stay away from a node that went down, or on which a role failed as it does where
    hardware is broken. Nodes are not excluded where too few others are left. 0: never."""

    def spares_of(self, role: str) -> int:
        """Return the spare nodes of a role with nodes of its own; ``engine`` is also for ``prefill`` and ``decode``."""
        named = {str(name): count for name, count in self.spare_nodes.items()}
        return named.get(role, named.get("engine", 0) if role in ("prefill", "decode") else 0)
