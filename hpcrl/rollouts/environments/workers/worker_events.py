"""Events about workers of environments, and complaints about them to the supervisor."""

from __future__ import annotations

from hpcrl.config.recipe import Recipe
from hpcrl.rollouts.environments.workers.link import LinkEvents
from hpcrl.rollouts.environments.workers.remote_environment import EnvironmentWorkers
from hpcrl.rollouts.supervised import Supervised
from hpcrl.runs.events import EventWriter
from hpcrl.runs.role import RoleContext


def workers_of(context: RoleContext, recipe: Recipe, events: EventWriter) -> EnvironmentWorkers | None:
    """Return the workers of a recipe, which are not started yet; None where the recipe has none."""
    if recipe.environment_workers is None:
        return None
    supervised = Supervised(context)
    told = LinkEvents(
        on_lost=lambda replica, why, calls: events.emit("env.lost", replica=replica, why=why, calls=calls),
        on_back=lambda replica, away_s: events.emit("env.back", replica=replica, away_s=round(away_s, 3)),
        on_silent=lambda replica, why: supervised.restart_worker(replica, f"does not answer the orchestrator: {why}"),
        on_process_lost=lambda name, why: events.emit("environment.lost", environment=name, why=why),
    )
    return EnvironmentWorkers(events=told, wait_timeout_s=recipe.orchestrator.wait_timeout_s)
