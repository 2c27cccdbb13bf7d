"""Interface of a rule across components."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.recipe import Recipe

Conflicts = Iterator[tuple[str, str]]
"""Pairs of a dotted key and what is wrong with it; keys of the profile begin with ``cluster.``."""


@dataclass(frozen=True)
class Rule:
    """A rule that recipe and cluster profile must keep together.

    Attributes
    ----------
    name:
        Stable name, shown with each conflict.
    conflict:
        Requirement, in one sentence.
    hint:
        Change that meets the requirement.
    check:
        Yields conflicts of a recipe on a cluster.
    submit_only:
        About what this version can start; a plan may ask for more.
    """

    name: str
    conflict: str
    hint: str
    check: Callable[[Recipe, ClusterProfile], Conflicts]
    submit_only: bool = False


@dataclass(frozen=True)
class SiteRule:
    """A rule within a cluster profile; attributes as those of `Rule`."""

    name: str
    conflict: str
    hint: str
    check: Callable[[ClusterProfile], Conflicts]


def on_slurm(check: Callable[[Recipe, SlurmCluster], Conflicts]) -> Callable[[Recipe, ClusterProfile], Conflicts]:
    """Return the check of a rule about sites with Slurm, for profiles of every kind."""

    def check_both(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
        if isinstance(cluster, SlurmCluster):
            yield from check(recipe, cluster)

    return check_both


def profile_variables(cluster: ClusterProfile, roles: Collection[str], name: str) -> Iterator[tuple[str, str]]:
    """Yield each key of a profile that gives one of the ``roles`` the variable ``name``, with its value there."""
    found = [("cluster.env", cluster.env)]
    if isinstance(cluster, SlurmCluster):
        found += [(f"cluster.env_by_role.{role}", env) for role, env in cluster.env_by_role.items() if role in roles]
    yield from ((f"{key}.{name}", env[name]) for key, env in found if name in env)


def trainer_needs_gpus(cluster: ClusterProfile, key: str, what: str) -> Conflicts:
    """Report a key that needs GPUs on the trainer's nodes where they have none; a local run's nodes are not known."""
    node = cluster.node_of("trainer")
    if node is not None and not node.gpus:
        yield key, f"{what} is for GPUs, and the trainer's nodes have none"
