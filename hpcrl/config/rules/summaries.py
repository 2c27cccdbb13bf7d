"""Rules of summaries of software-engineering tasks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.environments import SweEnv
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule


def _summarising(recipe: Recipe) -> Iterator[tuple[str, SweEnv]]:
    """Yield each environment that asks for summaries, with its key."""
    for number, environment in enumerate(recipe.environments):
        if isinstance(environment, SweEnv) and environment.summary_points:
            yield f"environments.{number}", environment


def _points_ascend(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, config in _summarising(recipe):
        for before, after in pairwise(config.summary_points):
            if after < before:
                yield f"{key}.summary_points", f"{after} follows {before}"


def _room_for_summaries(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, config in _summarising(recipe):
        limit, room = recipe.engine.max_model_len, config.summary_room_tokens
        if room >= limit:
            yield f"{key}.summary_room_tokens", f"{room} tokens are kept for a summary, of a context of {limit}"
        elif (largest := max(config.summary_points)) > limit - room:
            yield (
                f"{key}.summary_points",
                f"{largest} is above {limit - room}: the context has {limit} tokens, and {room} are kept for a summary",
            )


def _branches_for_summaries(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    # where earlier thinking is cut, the request for a summary, which is a message of the user, begins a branch, too
    each = 2 if recipe.model.chat.thinking == "cut" else 1
    for key, config in _summarising(recipe):
        if (needed := 1 + each * config.max_summaries) > recipe.rollouts.max_branches:
            has = f"rollouts.max_branches is {recipe.rollouts.max_branches}"
            yield f"{key}.max_summaries", f"{config.max_summaries} summaries need {needed} sequences, and {has}"


SWE_RULES: tuple[Rule, ...] = (
    Rule("summary-points", "summary_points ascend.", "sort them", _points_ascend),
    Rule(
        "summary-room",
        "A summary has room in the engine's context.",
        "lower summary_points or summary_room_tokens, or raise engine.max_model_len",
        _room_for_summaries,
    ),
    Rule(
        "summary-branches",
        "A rollout may have as many sequences as its summaries need.",
        "raise rollouts.max_branches, or lower max_summaries",
        _branches_for_summaries,
    ),
)
