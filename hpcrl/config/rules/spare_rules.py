"""Rules about spare nodes (``job.spare_nodes``)."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.node_demands import choose_layout, demands
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule, on_slurm

_KEY = "job.spare_nodes"
_LEAST = 2
"""Nodes with which Slurm keeps a component of a job that has lost one (``job_mgr.c``: ``node_cnt > 1``)."""


def _only_with_slurm(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if any(recipe.job.spare_nodes.values()) and not isinstance(cluster, SlurmCluster):
        yield _KEY, f"{cluster.name} is one machine without Slurm: there is no other node"


@on_slurm
def _for_roles_with_nodes(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    placed = {demand.role.value for demand in demands(recipe, cluster)}
    placed |= {"engine"} if placed & {"prefill", "decode"} else set()
    for role, count in recipe.job.spare_nodes.items():
        if count and role not in placed:
            yield f"{_KEY}.{role}", f"{role} has no nodes of its own in this run"
        elif count and recipe.job.layout == "elastic" and role != "trainer":
            yield f"{_KEY}.{role}", "in the layout elastic each engine is a job of its own, which is submitted again"


@on_slurm
def _lost_nodes_are_known(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    if any(recipe.job.spare_nodes.values()) and not cluster.capabilities.scontrol_on_nodes:
        yield _KEY, f"{cluster.name} cannot say on nodes which of them are down (capabilities.scontrol_on_nodes)"


@on_slurm
def _components_survive(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    if not any(recipe.job.spare_nodes.values()) or choose_layout(recipe, cluster)[0] != "hetjob":
        return
    for demand in demands(recipe, cluster):
        asked = demand.replicas * demand.nodes + recipe.job.spares_of(demand.role.value)
        if asked < _LEAST:
            what = f"the component of {demand.key} has {asked} node: Slurm ends the whole job when any node goes down"
            yield f"{_KEY}.{demand.role.value}", what


SPARE_RULES: tuple[Rule, ...] = (
    Rule(
        "spares-need-slurm",
        "Spare nodes are nodes of a Slurm job.",
        "leave job.spare_nodes out, or choose a Slurm site with --cluster",
        _only_with_slurm,
    ),
    Rule(
        "spares-for-roles",
        "Spare nodes are for roles that have nodes in the supervisor's job.",
        "name roles of this run that have nodes of their own; in the layout elastic only the trainer",
        _for_roles_with_nodes,
    ),
    Rule(
        "spares-need-scontrol",
        "A run with spare nodes can ask Slurm which nodes are down.",
        "leave job.spare_nodes out, or ask the admins for scontrol on compute nodes",
        _lost_nodes_are_known,
    ),
    Rule(
        "spares-in-each-component",
        "In a heterogeneous job with spare nodes each component has two nodes or more.",
        "give this role a spare node, too, or choose job.layout: single",
        _components_survive,
    ),
)
