"""Durations from runs: service times, fitted to their evidence (`hpcrl.simulation.inputs.evidence`)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from hpcrl.config.engine_shape import step_limits
from hpcrl.config.plan import Role
from hpcrl.planning.distributions import Constant, Distribution, Samples
from hpcrl.runs.rundir import RunDir
from hpcrl.simulation.inputs.durations import (
    Durations,
    EngineDurations,
    EnvironmentDurations,
    HandoffDurations,
    RecordedRollout,
    SharingDurations,
    TrainerDurations,
    TurnPlan,
)
from hpcrl.simulation.inputs.evidence import Evidence, read_evidence
from hpcrl.simulation.inputs.least_squares import least_squares
from hpcrl.simulation.inputs.timeline import Arrivals, Busy, Crowd, Interval, Kind

_ROUNDS = 3
_SAMPLES = 2000


def measure(*runs: RunDir, newest: int | None = None) -> Durations:
    """Return the durations of runs of one recipe, finished or not; several that differ in load are more precise.

    Waits of one role for another (of the trainer for a batch, of requests for their turn) are no input of a
    simulation: what is taken are service times. Where roles share one machine (a local run), they are those of work
    alone; the simulator slows them down under shared load. ``environments.*.latency`` of the run's recipe is left out:
    the simulator adds that of the recipe that it simulates.

    Parameters
    ----------
    newest:
        Number of newest steps of each run that are read; None for all.

    Raises
    ------
    UsageError
        A run has too few steps, or its rollouts do not say how long each request took.
    """
    found = [read_evidence(run, newest=newest) for run in runs]
    steps = sum(len(evidence.steps) for evidence in found)
    rollouts = sum(len(evidence.rollouts) for evidence in found)
    engine, crowds = _fit_engine(found)
    _tools_alone(found, crowds)
    counts: Counter[str] = Counter()
    for evidence in found:
        counts.update({name: int(value) for name, value in evidence.steps[-1].rollouts.items()})
    finished = max(1, counts["finished"])
    size = found[0].recipe.rollouts.group_size
    return Durations(
        source=f"measured from {', '.join(run.name for run in runs)} ({steps} steps, {rollouts} rollouts)",
        environments=_environments(found),
        engine=engine,
        trainer=_fit_trainer(found, crowds),
        handoff=_handoff(found, crowds),
        sharing=SharingDurations(cpus=found[0].cpus),
        failed_share=min(1.0, (counts["dropped_environment"] + counts["dropped_branches"]) / finished),
        zero_variance_share=min(1.0, counts["zero_variance_groups"] * size / finished),
    )


def _samples(values: Iterable[float]) -> Distribution:
    found = [round(max(0.0, value), 6) for value in values]
    if not found:
        return Constant(kind="constant", value=0.0)
    return Samples(kind="samples", values=tuple(found[:: -(-len(found) // _SAMPLES)]))


# -- fits


def _crowd(evidence: Evidence, overhead_s: float) -> Crowd:
    """Return the times of work: the orchestrator at the beginning of each request, the engine after the overhead.

    Discarded rollouts caused work, too, but are not recorded: each recorded rollout also stands for a share of them.
    """
    requests, each = [request.at for request in evidence.requests], evidence.use.started_each
    served = [Interval(min(at.end_s, at.begin_s + overhead_s), at.end_s) for at in requests]
    asked = [Interval(at.begin_s, min(at.end_s, at.begin_s + evidence.use.request_cpu_s)) for at in requests]
    updates = [Interval(e.time_s - e.data["seconds"], e.time_s) for e in evidence.updates]
    trainer = [interval for work in evidence.trainer for interval in work]
    slots = float(sum(evidence.slots.values())) or math.inf
    return Crowd(
        [
            Kind([*served, *updates], each, float(evidence.recipe.engine.replicas)),
            Kind([interval for _, interval in evidence.tools], each, slots),
            Kind(trainer, float(evidence.recipe.trainer.ranks)),
            Kind(asked, each, 1.0),
        ],
        evidence.cpus,
    )


def _tools_alone(found: Sequence[Evidence], crowds: Sequence[Crowd]) -> None:
    """Reduce the waits of tool calls to the seconds of work alone.

    Their mean is the CPU time of a call where the run recorded it: the seconds by the clock also hold waits behind
    calls that are not on record.
    """
    for evidence, crowd in zip(found, crowds, strict=True):
        seconds = [crowd.alone(interval) for _, interval in evidence.tools]
        cpu_s, total = evidence.use.tool_cpu_s, sum(seconds)
        level = cpu_s * len(seconds) / total if cpu_s and total and evidence.cpus else 1.0
        for (request, _), value in zip(evidence.tools, seconds, strict=True):
            request.wait_s = level * value


def _fit_engine(found: Sequence[Evidence]) -> tuple[EngineDurations, list[Crowd]]:
    """Fit ``reply alone = overhead + prefill · prompts + sampled · (base + per_sequence · batch)``.

    ``prompts`` are the new tokens of all requests that came while this one ran, itself included. The time in which
    the engine was frozen by an update is taken out of ``reply`` before. The orchestrator's part in the crowd is known
    only from the overhead: a few rounds.
    """
    overhead = prefill = base = per_sequence = 0.0
    crowds = [_crowd(evidence, 0.0) for evidence in found]
    for _ in range(_ROUNDS):
        rows, values = [], []
        for evidence, crowd in zip(found, crowds, strict=True):
            shape = evidence.recipe.engine
            replicas, most = shape.replicas, float(step_limits(shape, Role.DECODE).max_num_seqs)
            frozen = Busy([Interval(e.time_s - e.data["pause_s"], e.time_s) for e in evidence.updates])
            requests = evidence.requests
            concurrency = Busy([request.at for request in requests])
            arrivals = Arrivals([(request.at.begin_s, request.said) for request in requests])
            for request in requests:
                batch, n = min(concurrency.mean(request.at) / replicas, most), float(request.sampled)
                seconds = max(1e-9, request.at.end_s - request.at.begin_s)
                served = 1.0 - min(1.0, frozen.integral(request.at) / replicas / seconds)
                rows.append([1.0, arrivals.tokens(request.at) / replicas, n, n * batch])
                values.append(served * crowd.alone(request.at))
        overhead, prefill, base, per_sequence = least_squares(rows, values)
        crowds = [_crowd(evidence, overhead) for evidence in found]
    engine = EngineDurations(
        step_base_s=max(base, 1e-6),
        step_per_sequence_s=per_sequence,
        prefill_per_token_s=prefill,
        request_overhead_s=overhead,
        request_cpu_s=sum(evidence.use.request_cpu_s for evidence in found) / len(found),
    )
    return engine, crowds


def _fit_trainer(found: Sequence[Evidence], crowds: Sequence[Crowd]) -> TrainerDurations:
    """Fit ``base + per_token · tokens``; samples are those of work alone."""
    steps = [step for evidence in found for step in evidence.steps]
    pairs = [(work, crowd) for evidence, crowd in zip(found, crowds, strict=True) for work in evidence.trainer]
    rows = [[1.0, float(step.tokens)] for step in steps]
    seconds = [crowd.alone(work.forward_backward) for work, crowd in pairs]
    base, per_token = least_squares(rows, seconds)
    noise = [value / max(1e-9, base + per_token * row[1]) for value, row in zip(seconds, rows, strict=True)]
    level = sum(noise) / len(noise)
    return TrainerDurations(
        batch_s=_samples(wait for evidence in found for wait in evidence.batch_waits),
        forward_backward_base_s=base,
        forward_backward_per_token_s=per_token,
        forward_backward_noise=_samples(factor / level for factor in noise),
        optimizer_s=_samples(crowd.alone(work.optimizer) for work, crowd in pairs),
        other_s=_samples(step.phases_s["other"] for step in steps),
        checkpoint_s=_samples(stop for step in steps if (stop := step.phases_s.get("checkpoint", 0.0)) > 0),
        checkpoint_write_s=_samples(
            event.data["seconds"] - event.data.get("blocked_s", 0.0) for evidence in found for event in evidence.saves
        ),
    )


def _handoff(found: Sequence[Evidence], crowds: Sequence[Crowd]) -> HandoffDurations:
    pairs = list(zip(found, crowds, strict=True))
    return HandoffDurations(
        publish_s=_samples(crowd.alone(work.copy) for evidence, crowd in pairs for work in evidence.trainer),
        write_s=_samples(crowd.alone(work.write) for evidence, crowd in pairs for work in evidence.trainer),
        read_s=_samples(crowd.alone(at) for evidence, crowd in pairs for at, _ in _loads(evidence)),
        load_s=_samples(crowd.alone(at) for evidence, crowd in pairs for _, at in _loads(evidence)),
    )


def _loads(evidence: Evidence) -> Iterator[tuple[Interval, Interval]]:
    """Yield the intervals of fetching and loading of each update; without a freeze all of it is loading."""
    for event in evidence.updates:
        began_s, frozen_s = event.time_s - event.data["seconds"], event.time_s - event.data["pause_s"]
        if not event.data["pause_s"]:
            frozen_s = began_s
        yield Interval(began_s, frozen_s), Interval(frozen_s, event.time_s)


def _environments(found: Sequence[Evidence]) -> dict[str, EnvironmentDurations]:
    by_name: dict[str, list[RecordedRollout]] = defaultdict(list)
    slots: dict[str, int] = {}
    for evidence in found:
        slots |= evidence.slots
        latency = {environment.name: environment.latency.median_s for environment in evidence.recipe.environments}
        for rollout in evidence.rollouts:
            turns = tuple(
                TurnPlan(round(request.wait_s, 6), request.said, request.sampled, request.kept)
                for request in rollout.requests
            )
            judge_s = 0.0 if latency.get(rollout.environment) else round(rollout.judge_s, 6)
            by_name[rollout.environment].append(RecordedRollout(turns=turns, judge_s=judge_s))
    return {
        name: EnvironmentDurations(trace=tuple(trace), tool_slots=slots.get(name)) for name, trace in by_name.items()
    }
