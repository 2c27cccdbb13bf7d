"""Rules about sandboxes and the nodes that they are on."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule
from hpcrl.config.sandbox_use import sandbox_node, sandbox_uses


def _fits_node(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if recipe.job.payload == "probe":  # it reads no tasks
        return
    node, workers = sandbox_node(recipe, cluster), recipe.environment_workers
    text, memory_gib = node.text, node.memory_gib
    if node.role is Role.ENV and workers is not None and workers.memory_gib is not None:
        text, memory_gib = "a worker of environments", workers.memory_gib
    if (given := recipe.rollouts.sandboxes_gib) is not None and (memory_gib is None or given / node.parts < memory_gib):
        text, memory_gib = "rollouts.sandboxes_gib", given / node.parts
    if memory_gib is None:
        return
    for use in sandbox_uses(recipe):
        if use.memory_gib > memory_gib:
            what = f"one sandbox may use {use.memory_gib:g} GiB, and {text} has {memory_gib:g}"
            yield f"{use.section}.memory_gib", what


SANDBOX_RULES: tuple[Rule, ...] = (
    Rule(
        "sandbox-fits-node",
        "The limit of one sandbox is within the memory of its node, or of its worker, and of all sandboxes.",
        "lower memory_gib of the sandbox, or raise rollouts.sandboxes_gib, or give environments more memory "
        "(environment_workers)",
        _fits_node,
    ),
)
