"""Sandboxes of a recipe: the limits of each kind of them, how many may be open at once, and the node that they are on.

Environments run with the orchestrator, or in workers of their own; their sandboxes are on the same node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcrl.config.cluster import ClusterProfile, LocalCluster
from hpcrl.config.environments import HarnessEnv, SweEnv, TaskFileEnv
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.config.rewards import CodeReward


@dataclass(frozen=True, slots=True)
class SandboxUse:
    """Sandboxes that one environment opens for one purpose; of several rewards those with the most memory.

    Attributes
    ----------
    environment:
        Name of the environment.
    section:
        Dotted key of the section with ``memory_gib``.
    memory_gib:
        Limit of one sandbox in GiB, files included.
    at_once:
        Sandboxes that one process of the environment may have open at once; None: as many as it has rollouts.
    limit:
        Name of the setting ``at_once`` comes from, in the section; empty where there is none.
    """

    environment: str
    section: str
    memory_gib: float
    at_once: int | None = None
    limit: str = ""

    @property
    def label(self) -> str:
        """Return a name for people, unique in the recipe."""
        return f"rewards of {self.environment}" if ".rewards." in self.section else self.environment


@dataclass(frozen=True, slots=True)
class SandboxNode:
    """A node with sandboxes.

    Attributes
    ----------
    role:
        Role whose node it is.
    text:
        The node in words.
    memory_gib:
        Memory of the node in GiB, or the part of it that the job asks for; None: the profile does not say.
    cpus:
        Processors of the node, or the part of them; None: the profile does not say.
    processes, of:
        Processes of each environment on the node, and in the run.
    parts:
        Workers on the node that have equal parts of its memory; 1 where all processes share it.
    """

    role: Role
    text: str
    memory_gib: float | None
    cpus: int | None
    processes: int = 1
    of: int = 1
    parts: int = 1


def sandbox_uses(recipe: Recipe) -> Iterator[SandboxUse]:
    """Yield the sandboxes of each environment; a supervised run has none.

    Those of ``kind: custom`` and ``kind: verifiers`` have limits of their own, which a recipe does not tell.
    """
    for number, environment in enumerate(() if recipe.sft is not None else recipe.environments):
        name, section = environment.name, f"environments.{number}"
        if isinstance(environment, SweEnv):
            # the sandbox of the agent ends before that of the judge starts
            yield SandboxUse(name, section, environment.memory_gib, environment.max_sandboxes, "max_sandboxes")
        if isinstance(environment, HarnessEnv) and environment.sandbox is not None:
            yield SandboxUse(name, f"{section}.sandbox", environment.sandbox.memory_gib)
        if isinstance(environment, TaskFileEnv):
            rewards = [
                (each.memory_gib, n) for n, each in enumerate(environment.rewards) if isinstance(each, CodeReward)
            ]
            if rewards:
                # a process of checkers judges one reply at a time
                memory_gib, n = max(rewards)
                yield SandboxUse(name, f"{section}.rewards.{n}", memory_gib, environment.checker_processes)


def sandbox_node(recipe: Recipe, cluster: ClusterProfile) -> SandboxNode:
    """Return the node that has the most sandboxes of a run."""
    workers = recipe.environment_workers
    processes = 1 if workers is None else workers.count
    if isinstance(cluster, LocalCluster):
        parts = 1 if workers is None or workers.memory_gib is None else processes
        return SandboxNode(Role.TRAINER, "this machine", cluster.memory_gib, None, processes, processes, parts)
    if workers is not None and workers.apart:
        node, here = cluster.node_of("env"), min(workers.per_node, workers.count)
        memory = node.memory_gib if workers.memory_gib is None else workers.memory_gib * here
        cpus = node.cpus if workers.cpus is None else workers.cpus * here
        parts = 1 if workers.memory_gib is None else here
        return SandboxNode(Role.ENV, "a node of environment workers", memory, cpus, here, workers.count, parts)
    if cluster.orchestrator_apart and workers is None:
        node = cluster.node_of("orchestrator")
        return SandboxNode(Role.ORCHESTRATOR, "the orchestrator's node", node.memory_gib, node.cpus)
    role, text = Role.TRAINER, "the trainer's first node"
    if recipe.job.payload == "evaluation":
        role, text = Role.ENGINE, "an engine's node"
    node = cluster.node_of(role)
    return SandboxNode(role, text, node.memory_gib, node.cpus, processes, processes)
