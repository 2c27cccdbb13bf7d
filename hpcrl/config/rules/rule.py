"""What a rule across components is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.recipe import Recipe

__all__ = ["Conflicts", "Rule", "SiteRule", "profile_variables", "trainer_needs_gpus"]

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
        What must hold, in one sentence.
    hint:
        What to change.
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


def profile_variables(cluster: ClusterProfile, roles: Collection[str], name: str) -> Iterator[tuple[str, str]]:
    """Where a profile gives one of the ``roles`` the variable ``name``: the key, and its value there."""
    found = [("cluster.env", cluster.env)]
    if isinstance(cluster, SlurmCluster):
        found += [(f"cluster.env_by_role.{role}", env) for role, env in cluster.env_by_role.items() if role in roles]
    yield from ((f"{key}.{name}", env[name]) for key, env in found if name in env)


def trainer_needs_gpus(cluster: ClusterProfile, key: str, what: str) -> Conflicts:
    """Where the trainer's nodes have no GPUs, what a key asks for is in vain; a local run's are not known."""
    if isinstance(cluster, SlurmCluster) and not cluster.partitions[cluster.partition_name("trainer")].node.gpus:
        yield key, f"{what} is for GPUs, and the trainer's nodes have none"
