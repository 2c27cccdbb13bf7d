"""Room for routed experts of rollouts in flight: what one may need, and how many may run for it."""

from __future__ import annotations

from hpcrl.config.recipe import Recipe
from hpcrl.config.rollouts import PAYLOAD_COPIES
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.ledger import GIB

__all__ = ["may_fly", "rollout_routes_bytes", "token_routes_bytes"]


def token_routes_bytes(facts: ModelFacts) -> int:
    """Bytes of a token's rows on hosts and between them: engines report all layers, also those without experts.

    A number a layer and chosen expert, as wide as the number of experts asks for (`hpcrl.dock.routes.exact_dtype`).
    """
    width = 1 if facts.num_experts <= 256 else 2
    return len(facts.layers) * facts.num_experts_per_tok * width


def rollout_routes_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """The most bytes that a rollout in flight may need for its rows."""
    return PAYLOAD_COPIES * recipe.engine.max_model_len * token_routes_bytes(facts)


def may_fly(recipe: Recipe, facts: ModelFacts) -> tuple[int, str]:
    """How many rollouts may be in flight, and the setting that says so.

    Where ``rollouts.routes_in_flight_gib`` is not set the orchestrator takes a share of the memory that it finds free,
    which no plan knows: then it bounds nothing here.
    """
    flying, limit = recipe.rollouts.max_in_flight, recipe.rollouts.routes_in_flight_gib
    if limit is not None and recipe.returns_routed_experts and (one := rollout_routes_bytes(recipe, facts)):
        # as the orchestrator does (`hpcrl.rollouts.sampling.routes_room`): whole groups begin, one always
        places = max(1, round(limit * GIB) // one, recipe.rollouts.group_size)
        if places < flying:
            return places, "rollouts.routes_in_flight_gib"
    return flying, "max_in_flight"
