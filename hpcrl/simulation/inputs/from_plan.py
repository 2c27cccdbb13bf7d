"""Durations of the planner's time model: what a simulation takes where no run was measured."""

from __future__ import annotations

from random import Random

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.planning.calibration.calibration_file import Calibration
from hpcrl.planning.distributions import Constant, Distribution
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.memory.fit import MemoryReport
from hpcrl.planning.report import Outlook, find_facts, make_outlook
from hpcrl.planning.times.forecast import Forecast, site_rates
from hpcrl.planning.times.serving import ServingFleet
from hpcrl.planning.times.terms import TimeTable
from hpcrl.planning.times.workload import EnvironmentLoad
from hpcrl.simulation.inputs.durations import (
    Durations,
    EngineDurations,
    EnvironmentDurations,
    HandoffDurations,
    RecordedRollout,
    TrainerDurations,
    TurnPlan,
)

_BEFORE_READING = ("handoff.serve", "handoff.write", "handoff.commit")
_TRACE = 256
"""Rollouts that stand for an environment."""
_HINT = "    hint: --durations FILE (docs/simulation.md has an example), or --durations RUN to measure a run"


def durations_from_plan(recipe: Recipe, cluster: ClusterProfile, calibration: Calibration) -> Durations:
    """Return the durations that `hpcrl plan` predicts around the number of sequences of its steady state.

    Raises
    ------
    UsageError
        The planner has no times for this recipe on this cluster: no described hardware, no model, a number missing.
    """
    return durations_from_outlook(make_outlook(recipe, cluster, calibration, find_facts(recipe)), calibration)


def durations_from_outlook(outlook: Outlook, calibration: Calibration) -> Durations:
    """Return the durations of an existing plan; ``calibration`` is the one that it was made with.

    Raises as `durations_from_plan`.
    """
    recipe, cluster, whole = outlook.recipe, outlook.cluster, outlook.forecast
    if whole is None or whole.loop is None or not isinstance(cluster, SlurmCluster):
        why = outlook.because or f"the recipe has no forecast on {cluster.name}"
        if not isinstance(cluster, SlurmCluster):
            why = f"cluster profile {cluster.name} describes no hardware"
        raise UsageError(f"nothing says how long {recipe.name} takes: {why}\n{_HINT}")
    handoff = whole.tables["handoff"]
    # what passes before engines can see a version: without its write where that is served over the fabric
    before = [term.name for term in handoff if term.counts and term.name in _BEFORE_READING]
    copy_s, write_s = _seconds(handoff, "handoff.copy_out"), _seconds(handoff, *before)
    if not recipe.handoff.overlap:
        copy_s, write_s = copy_s + write_s, 0.0
    return Durations(
        source=f"predicted by the planner for {recipe.name} on {cluster.name} (hpcrl plan --explain shows each term)",
        environments={load.name: _environment(recipe, load) for load in whole.workload.environments},
        engine=_engine(whole, outlook.memory, cluster, calibration, recipe),
        trainer=_trainer(recipe, whole),
        handoff=HandoffDurations(
            publish_s=_constant(copy_s),
            write_s=_constant(write_s),
            read_s=_constant(_seconds(handoff, "handoff.read")),
            load_s=_constant(_seconds(handoff, "handoff.load")),
        ),
    )


def _constant(value: float) -> Distribution:
    return Constant(kind="constant", value=value)


def _seconds(table: TimeTable, *names: str) -> float:
    return sum(table[name].value or 0.0 for name in names)


def _environment(recipe: Recipe, load: EnvironmentLoad) -> EnvironmentDurations:
    """Return rollouts from end to end of the distributions: long ones have more turns, and wait more often."""
    # the recipe's latency is in the planner's waits, and the simulator adds it again by itself
    latency = next(env.latency.median_s for env in recipe.environments if env.name == load.name)
    judge = Quantiles((0.0,)) if latency else load.judge
    rng = Random(f"{recipe.seed}-{load.name}")
    judged = judge.sample(_TRACE)
    rng.shuffle(judged)
    # every tool call of every rollout draws from the whole distribution
    calls = load.tool.sample(_TRACE)
    rollouts = [
        _rollout(load, length, judge_s, calls, rng)
        for length, judge_s in zip(load.tokens.sample(_TRACE), judged, strict=True)
    ]
    return EnvironmentDurations(trace=tuple(rollouts))


def _rollout(load: EnvironmentLoad, length: float, judge_s: float, calls: list[float], rng: Random) -> RecordedRollout:
    turns = max(1, round(load.turns_of(length)))
    sampled = load.sampled(length)
    said = max(0.0, length - load.prompt_tokens - sampled)
    own, heard = _shares(round(sampled), turns), _shares(round(said), turns - 1)
    first = TurnPlan(0.0, max(1, round(load.prompt_tokens)), max(1, own[0]))
    later = (TurnPlan(round(rng.choice(calls), 3), heard[i - 1], max(1, own[i])) for i in range(1, turns))
    return RecordedRollout(turns=(first, *later), judge_s=round(judge_s, 3))


def _shares(total: int, parts: int) -> list[int]:
    """Return whole numbers that add up to ``total``, as equal as possible."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def _engine(
    whole: Forecast, memory: MemoryReport | None, cluster: SlurmCluster, calibration: Calibration, recipe: Recipe
) -> EngineDurations:
    assert whole.loop is not None
    layout, site = whole.layout, site_rates(cluster, calibration)
    serving = ServingFleet(
        whole.facts,
        whole.workload,
        layout.decode,
        site.decode,
        layout.prefill,
        site.prefill if layout.prefill else None,
    )
    line = serving.step_line(whole.loop.served.batch)
    ranks = layout.decode.data_parallel
    return EngineDurations(
        ranks=ranks,
        step_base_s=max(1e-6, line.base_s),
        step_per_sequence_s=max(0.0, line.per_sequence_s),
        step_per_kv_token_s=max(0.0, line.per_kv_token_s),
        prefill_per_token_s=line.prefill_per_token_s,
        request_overhead_s=calibration.constant("request_overhead_s"),
        kv_tokens=_kv_tokens(memory, ranks, recipe),
    )


def _kv_tokens(memory: MemoryReport | None, ranks: int, recipe: Recipe) -> int | None:
    """Return the tokens that all ranks of a replica hold; None where the profile lacks the memory of a GPU."""
    places = [] if memory is None else [p for p in memory.places if p.role in (Role.DECODE, Role.ENGINE)]
    tokens = next((place.kv.tokens * ranks for place in places if place.kv is not None), None)
    return None if tokens is None else max(tokens, recipe.engine.max_model_len)


def _trainer(recipe: Recipe, whole: Forecast) -> TrainerDurations:
    table, checkpoint = whole.tables["trainer"], whole.tables["checkpoint"]
    optimizer_s = sum(term.value or 0.0 for term in table if term.counts and term.name.startswith("optimizer."))
    tokens = recipe.rollouts.rollouts_per_step * whole.workload.mean("tokens")
    saved_s, stored_s = _seconds(checkpoint, "checkpoint.copy_out"), _seconds(checkpoint, "checkpoint.write")
    if recipe.checkpoint.mode == "sync":
        saved_s, stored_s = saved_s + stored_s, 0.0
    return TrainerDurations(
        forward_backward_per_token_s=(table.known_seconds - optimizer_s) / tokens,
        optimizer_s=_constant(optimizer_s),
        checkpoint_s=_constant(saved_s),
        checkpoint_write_s=_constant(stored_s),
        restart_s=_constant(whole.tables["startup"].seconds or 0.0),
    )
