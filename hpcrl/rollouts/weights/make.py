"""Build the updater that keeps the engines of a recipe at the newest version."""

from __future__ import annotations

from collections.abc import Callable

from hpcrl.config.recipe import Recipe
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.weights.registration import ReaderRegistration
from hpcrl.rollouts.weights.turns import TurnUpdater
from hpcrl.rollouts.weights.update_sources import UpdateSources
from hpcrl.rollouts.weights.updates import WeightUpdater
from hpcrl.runs.events import EventWriter
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import HandoffStore
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.read.share import Pace


def make_updater(
    recipe: Recipe,
    run: RunDir,
    *,
    pool: EnginePool,
    events: EventWriter,
    on_served: Callable[[int], None],
    on_stale: Callable[[Engine, str], None],
    on_wrong: Callable[[Engine, str], None] | None = None,
    attempt: int = 0,
    choose: Callable[[int], int] | None,
) -> WeightUpdater:
    """Return the updater of the recipe: from files, or in turns with the trainer. Parameters: see `WeightUpdater`."""
    handoff, store = recipe.handoff, HandoffStore(run.weights_dir)
    watch = ReaderWatch(store.root, expiry_s=handoff.lease_timeout_s)
    make = TurnUpdater if recipe.engine.is_colocated else WeightUpdater
    return make(
        pool=pool,
        store=store,
        events=events,
        pause=recipe.engine.pause == "keep",
        registration=ReaderRegistration.of(recipe, store.root),
        collector=Collector(store, watch, keep_last=handoff.keep_last),
        pace=Pace(handoff.update_timeout_s, handoff.min_bandwidth_mib_s * (1 << 20)),
        on_served=on_served,
        on_stale=on_stale,
        on_wrong=on_wrong,
        attempt=attempt,
        choose=choose,
        # a watch of its own: that of the collector is used in another thread
        sources=UpdateSources(ReaderWatch(store.root, expiry_s=handoff.lease_timeout_s), events)
        if handoff.transport == "fabric"
        else None,
    )
