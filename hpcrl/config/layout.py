"""How the role groups of a plan become jobs: components, containers, attempts. Pure data, part of the plan."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel

__all__ = ["AttemptPolicy", "Container", "ElasticPolicy", "JobComponent", "Layout", "LayoutKind"]

LayoutKind = Literal["local", "hetjob", "single", "elastic"]


class JobComponent(StrictModel):
    """Equal nodes that are asked for together.

    ``hetjob``: one component of the heterogeneous job, its index is the het group. ``single``: the one allocation.
    ``elastic``: the job of the trainer (index 0), or ``jobs`` equal jobs, one a replica.
    """

    roles: tuple[str, ...]
    """Roles that have their nodes here."""
    nodes: PositiveInt
    """Nodes of one job."""
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
    """How GPUs are asked for."""
    exclusive: bool
    """Ask for whole nodes; else for ``cpus`` and ``memory_gib`` by number."""
    cpus: PositiveInt
    """CPUs of a node."""
    memory_gib: PositiveFloat
    """Memory of a node in GiB."""
    segment: PositiveInt | None = None
    """Nodes that must lie in one block of the topology."""


class Layout(StrictModel):
    """The jobs of a run."""

    kind: LayoutKind = "local"
    reason: str = ""
    """Why this one, in a sentence."""
    components: tuple[JobComponent, ...] = ()
    """Empty on this machine."""
    sbatch_options: tuple[str, ...] = ()
    """More options of sbatch, as the recipe says them; each job of the run gets them."""

    @property
    def nodes(self) -> int:
        """All nodes of the run."""
        return sum(component.nodes * component.jobs for component in self.components)

    @property
    def main_nodes(self) -> int:
        """Nodes of the job that the supervisor is in: in the layout ``elastic`` engines have jobs of their own."""
        return self.components[0].nodes if self.kind == "elastic" else self.nodes

    @property
    def gpus(self) -> int:
        """All GPUs of the run."""
        return sum(c.nodes * c.jobs * c.gpus_per_node for c in self.components)


class Container(StrictModel):
    """What roles run in."""

    kind: Literal["pyxis", "apptainer"]
    image: str
    mounts: tuple[str, ...] = ()
    """``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``, the run's own directories included."""
    mount_home: bool = False


class ElasticPolicy(StrictModel):
    """How replicas come and go in the layout ``elastic``, where each has a job of its own."""

    min_replicas: PositiveInt = 1
    """The run starts when so many replicas of each inference role are ready."""
    wait_s: PositiveFloat = 7200.0
    """Longest time with fewer than that before the start, or with none later; then the run ends."""
    hold_s: PositiveFloat = 900.0
    """A replica's job keeps its nodes for so long while the trainer's job waits in the queue; then it gives them
    back."""
    max_resubmits: NonNegativeInt = 20
    """Jobs of one replica that may end and be replaced in one attempt of the run."""


class AttemptPolicy(StrictModel):
    """What follows the end of an attempt that is not the end of the run."""

    requeue: bool = False
    """Slurm may start the next attempt: after a node failure, a preemption, the time limit."""
    max_attempts: PositiveInt = 1
    """Attempts of the run, the first included."""
    max_without_progress: PositiveInt = 1
    """Attempts in a row without a new joint checkpoint; then the run is given up."""
    on_change: Literal["warn", "stop"] = "warn"
    """What an attempt does that would run something else than what was submitted."""
    signal_lead_s: NonNegativeInt = 0
    """Slurm sends USR2 to the supervisor this long before the time limit; 0: no signal."""
    signalled: bool = True
    """Slurm sends that signal. Else, inside of an allocation of somebody's shell, the supervisor goes by the clock."""
    retries: NonNegativeInt = 0
    """New attempts that may follow the failure of a role, where the attempt made a joint checkpoint."""
    exclude_s: NonNegativeFloat = 0.0
    """How long a failed node is avoided; 0: not at all."""
    saves: bool = True
    """Whether the trainer can be asked for a checkpoint (the payload ``probe`` cannot)."""
