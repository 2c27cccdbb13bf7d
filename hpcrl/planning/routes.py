"""Room for routed experts of rollouts in flight: what one may need, and how many may run for it."""

from __future__ import annotations

from hpcrl.config.recipe import Recipe
from hpcrl.config.rollouts import PAYLOAD_COPIES
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.ledger import GIB


def token_routes_bytes(facts: ModelFacts) -> int:
    """Return the bytes of a token's routed experts on hosts and between them.

    Engines report all layers, also those without experts.

    A number a layer and chosen expert, as wide as the number of experts asks for (`hpcrl.dock.routes.exact_dtype`).
    """
    width = 1 if facts.num_experts <= 256 else 2
    return len(facts.layers) * facts.num_experts_per_tok * width


def rollout_routes_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """Return the maximum bytes of routed experts of a rollout in flight."""
    return PAYLOAD_COPIES * recipe.engine.max_model_len * token_routes_bytes(facts)


def max_rollouts_in_flight(recipe: Recipe, facts: ModelFacts) -> tuple[int, str]:
    """Return the maximum number of rollouts in flight, and the setting that limits it.

    Where ``rollouts.routes_in_flight_gib`` is not set the orchestrator takes a share of the memory that it finds free,
    which a plan cannot know: then this setting does not limit the number here.
    """
    flying, limit = recipe.rollouts.max_in_flight, recipe.rollouts.routes_in_flight_gib
    if limit is not None and recipe.returns_routed_experts and (one := rollout_routes_bytes(recipe, facts)):
        # like the orchestrator (`hpcrl.rollouts.sampling.routed_experts_budget`): whole groups begin, at least one
        places = max(1, round(limit * GIB) // one, recipe.rollouts.group_size)
        if places < flying:
            return places, "rollouts.routes_in_flight_gib"
    return flying, "max_in_flight"
