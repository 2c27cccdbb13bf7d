"""Warning of a submit about the memory that sandboxes may need together."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.recipe import Recipe
from hpcrl.config.sandbox_use import sandbox_node, sandbox_uses
from hpcrl.errors import HpcrlError
from hpcrl.models.facts import ModelFacts
from hpcrl.models.known import load_facts
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.fit import memory_report
from hpcrl.planning.memory.sandbox_memory import SandboxMemory, open_sandboxes


def sandbox_notes(recipe: Recipe, cluster: ClusterProfile) -> list[str]:
    """Return a sentence where the sandboxes of a run may need more memory than their node has left.

    Where the memory of the other roles cannot be planned, because the model or a number of the profile is not known,
    the memory of the whole node is compared.
    """
    if recipe.job.payload != "roles" or not any(sandbox_uses(recipe)):
        return []
    found = _planned_sandboxes(recipe, cluster)
    return [found.warning] if found is not None and found.warning else []


def _planned_sandboxes(recipe: Recipe, cluster: ClusterProfile) -> SandboxMemory | None:
    facts: ModelFacts | None = None
    try:
        facts = load_facts(recipe.model.path)
        return memory_report(recipe, cluster, facts).sandboxes
    except (OSError, ValueError, HpcrlError):
        memory_gib = sandbox_node(recipe, cluster).memory_gib
        left = None if memory_gib is None else round(memory_gib * GIB)
        return open_sandboxes(recipe, cluster, facts, left, alone=True)
