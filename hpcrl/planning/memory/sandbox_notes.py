"""Memory of all sandboxes of a run together: its limit in the plan of the run, and the warning of a submit."""

from __future__ import annotations

import hashlib

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.plan import Plan, Role
from hpcrl.config.recipe import Recipe
from hpcrl.config.sandbox_use import sandbox_node, sandbox_uses
from hpcrl.errors import HpcrlError
from hpcrl.models.facts import ModelFacts
from hpcrl.models.known import load_facts
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.fit import memory_report
from hpcrl.planning.memory.sandbox_memory import SandboxMemory, open_sandboxes
from hpcrl.processes.environment_marks import SANDBOX_MEMORY_VARIABLE


def sandbox_notes(recipe: Recipe, cluster: ClusterProfile) -> list[str]:
    """Return a sentence where the sandboxes of a run may need more memory than their node has left.

    Where the memory of the other roles cannot be planned, because the model or a number of the profile is not known,
    the memory of the whole node is compared.
    """
    if recipe.job.payload != "roles" or not any(sandbox_uses(recipe)):
        return []
    found = _planned_sandboxes(recipe, cluster)
    return [found.warning] if found is not None and found.warning else []


def with_sandbox_limit(plan: Plan, recipe: Recipe, cluster: ClusterProfile) -> Plan:
    """Return the plan with the limit of all sandboxes of a node in the environment of the role that has them.

    It is the plan as it was where no limit is known (see `SandboxMemory.limit`).
    """
    if recipe.job.payload == "probe" or recipe.sft is not None:
        return plan
    given, limit = recipe.rollouts.sandboxes_gib, None
    if given is not None:  # it also holds for environments whose sandboxes a recipe does not tell
        limit = round(given * GIB) // sandbox_node(recipe, cluster).parts
    elif any(sandbox_uses(recipe)) and (found := _planned_sandboxes(recipe, cluster)) is not None:
        limit = found.limit
    if limit is None:
        return plan
    role = Role.ORCHESTRATOR if recipe.environment_workers is None else Role.ENV
    # daemons of the run on one node share the limit, and runs have one each
    value = f"{limit}:{hashlib.sha256(str(plan.run_dir).encode()).hexdigest()[:32]}"
    return plan.model_copy(
        update={
            "groups": tuple(
                group.model_copy(update={"env": {SANDBOX_MEMORY_VARIABLE: value, **group.env}})
                if group.role is role
                else group
                for group in plan.groups
            )
        }
    )


def _planned_sandboxes(recipe: Recipe, cluster: ClusterProfile) -> SandboxMemory | None:
    facts: ModelFacts | None = None
    try:
        facts = load_facts(recipe.model.path)
        return memory_report(recipe, cluster, facts).sandboxes
    except (OSError, ValueError, HpcrlError):
        memory_gib = sandbox_node(recipe, cluster).memory_gib
        left = None if memory_gib is None else round(memory_gib * GIB)
        return open_sandboxes(recipe, cluster, facts, left, alone=True)
