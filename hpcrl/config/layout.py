"""Jobs of a plan's role groups: components, containers, attempts. Pure data, part of the plan."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel

LayoutKind = Literal["local", "hetjob", "single", "elastic"]


class JobComponent(StrictModel):
    """Equal nodes that are asked for together.

    ``hetjob``: one component of the heterogeneous job, its index is the het group. ``single``: the one allocation.
    ``elastic``: the job of the trainer (index 0), or ``jobs`` equal jobs, one a replica.
    """

    roles: tuple[str, ...]
    """Roles that have their nodes here."""
    nodes: PositiveInt
    """Nodes of one job that roles use."""
    spares: NonNegativeInt = 0
    """Further nodes of the job, which replace those that go down."""
    jobs: PositiveInt = 1
    """Jobs of this shape (more than one only in the layout ``elastic``)."""
    partition: str
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    gpus_per_node: NonNegativeInt
    """GPUs to ask for on each node; 0 asks for none."""
    gpu_type: str | None = None
    gres: Literal["gres", "gpus_per_node", "none"]
    """Option by which GPUs are requested."""
    exclusive: bool
    """Ask for whole nodes; else for ``cpus`` and ``memory_gib`` by number."""
    cpus: PositiveInt
    """CPUs of a node."""
    memory_gib: PositiveFloat
    """Memory of a node in GiB."""
    segment: PositiveInt | None = None
    """Nodes that must lie in one block of the topology."""

    @property
    def asked(self) -> int:
        """Return the nodes that one job asks Slurm for, the spare ones included."""
        return self.nodes + self.spares


class Layout(StrictModel):
    """The jobs of a run."""

    kind: LayoutKind = "local"
    reason: str = ""
    """Reason for this layout, in a sentence."""
    components: tuple[JobComponent, ...] = ()
    """Empty on this machine."""
    sbatch_options: tuple[str, ...] = ()
    """More options of sbatch, as the recipe says them; each job of the run gets them."""

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the run, the spare ones included."""
        return sum(component.asked * component.jobs for component in self.components)

    @property
    def spares(self) -> int:
        """Return the number of spare nodes; with any, the job survives the loss of a node (``--no-kill``)."""
        return sum(component.spares for component in self.components)

    @property
    def main_nodes(self) -> int:
        """Return the nodes of the supervisor's job: in the layout ``elastic`` engines have their own jobs."""
        return self.components[0].asked if self.kind == "elastic" else self.nodes

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the run."""
        return sum(c.asked * c.jobs * c.gpus_per_node for c in self.components)


class Container(StrictModel):
    """Container in which roles run."""

    kind: Literal["pyxis", "apptainer"]
    image: str
    mounts: tuple[str, ...] = ()
    """``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``, the run's own directories included."""
    mount_home: bool = False


class ElasticPolicy(StrictModel):
    """Start and end of replicas in the layout ``elastic``, where each has its own job."""

    min_replicas: PositiveInt = 1
    """Number of replicas of each inference role that must be ready before the run starts."""
    wait_s: PositiveFloat = 7200.0
    """Longest time with fewer than that before the start, or with none later; then the run ends."""
    hold_s: PositiveFloat = 900.0
    """A replica's job keeps its nodes for so long while the trainer's job waits in the queue; then it gives them
    back."""
    max_resubmits: NonNegativeInt = 20
    """Jobs of one replica that may end and be replaced in one attempt of the run."""


class AttemptPolicy(StrictModel):
    """Actions after the end of an attempt that does not end the run."""

    requeue: bool = False
    """Slurm may start the next attempt: after a node failure, a preemption, the time limit."""
    max_attempts: PositiveInt = 1
    """Attempts of the run, the first included."""
    max_without_progress: PositiveInt = 1
    """Attempts in a row without a new joint checkpoint; then the run is given up."""
    on_change: Literal["warn", "stop"] = "warn"
    """Action of an attempt that would run other software than what was submitted."""
    signal_lead_s: NonNegativeInt = 0
    """Slurm sends USR2 to the supervisor this long before the time limit; 0: no signal."""
    signalled: bool = True
    """Whether Slurm sends that signal. Else, inside the allocation of a shell, the supervisor uses the clock."""
    retries: NonNegativeInt = 0
    """New attempts that may follow the failure of a role, where the attempt made a joint checkpoint."""
    exclude_s: NonNegativeFloat = 0.0
    """Seconds for which a failed node is avoided; 0: not at all."""
    saves: bool = True
    """Whether the trainer can be asked for a checkpoint (the payload ``probe`` cannot)."""
