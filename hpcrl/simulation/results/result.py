"""Result of a simulation: a versioned document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from hpcrl.config.base import StrictModel
from hpcrl.simulation.loop.records import Outcome
from hpcrl.simulation.loop.simulation import Simulation
from hpcrl.simulation.loop.tally import StepSample

_POINTS = 1000


class Spread(StrictModel):
    """A distribution in a few numbers."""

    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value; zeros where there is none."""
        if not values:
            return cls(mean=0.0, p10=0.0, p50=0.0, p90=0.0, p99=0.0, maximum=0.0)
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        mean = sum(ordered) / len(ordered)
        return cls(mean=mean, p10=at(0.1), p50=at(0.5), p90=at(0.9), p99=at(0.99), maximum=ordered[-1])


class Staleness(StrictModel):
    """Staleness of consumed rollouts, in policy versions."""

    bound: int
    mean: float
    maximum: int
    histogram: dict[str, int]
    """Rollouts by staleness (string keys, as in ``metrics/``)."""


class EngineShares(StrictModel):
    """Times of engines by activity, as shares of the simulated time; with ``down``, of failures, the sum is 1."""

    busy: float
    """With sequences in the batch."""
    frozen: float
    """Stopped by a weight update."""
    idle: float
    """Without any request: tools, the trainer, or the stragglers of others hold all of them."""
    down: float
    """Between a node failure and the next attempt."""
    prefill_busy: float
    """Share of prefill engines, where there are some: computing prompts."""
    sampled_tokens_per_s: float
    """Sampled tokens of all engines, in the size in question."""
    preemptions: int
    """Sequences that gave their KV back because it was full."""
    kv_mean: float
    """Mean share of the KV capacity in use; in tokens where no capacity is given."""
    kv_peak: float
    """Largest share (or tokens) in one engine at any time."""


class FailureTotals(StrictModel):
    """Node failures."""

    count: int
    lost_steps: int
    """Optimizer steps that were done again."""
    lost_s: float
    """Seconds of work since the checkpoints that the next attempts began with."""
    down_s: float
    """Seconds of requeues and starts."""
    replaced: int = 0
    """Failures after which a spare node took the place of the lost one."""


class Goodput(StrictModel):
    """The part of the time that went into the result."""

    trainer: float
    """Share of the time in forward, backward and optimizer of steps that were kept."""
    engines: float
    """Share of the time in which engines worked on tokens that kept steps consumed."""
    share: float
    """Both, weighted by nodes."""
    node_hours: float
    gpu_hours: float
    """GPU-hours of the whole run; 0 where the cluster has no GPUs."""
    useful_gpu_hours: float


class KvPoint(StrictModel):
    """All engines at one moment."""

    time_s: float
    mean: float
    """Share of the KV capacity in use, or tokens where none is given."""
    highest: float
    """Share of the fullest engine."""
    running: float
    """Sequences in the batch of an engine, mean."""
    waiting: float
    """Requests in the queue of an engine, mean."""


class StepPoint(StrictModel):
    """One optimizer step."""

    step: int
    end_s: float
    phases_s: dict[str, float]
    staleness_mean: float
    staleness_max: int
    tokens: int


class SimulationResult(StrictModel):
    """The result of one simulation. Counts of rollouts are those simulated: one of ``thinning`` of all."""

    version: Literal[1] = 1
    """Version of this document."""
    recipe: str
    durations: str
    """Source of the durations."""
    seed: int
    simulated_s: float
    """Shorter than what was asked for where the recipe's last step came first."""
    nodes: int
    trainer_nodes: int
    engine_nodes: int
    env_nodes: int = 0
    engines: int
    rollouts_per_step: int
    max_in_flight: int
    thinning: float
    merged_turns: int = 1
    """Turns of a recorded rollout that were simulated as one."""
    engines_simulated: int
    mtbf_h: float | None
    steps: int
    """Optimizer steps that were kept."""
    skipped_steps: int
    """First steps that the figures of steps leave out: the loop fills."""
    steps_per_minute: float
    """Between the end of the skipped steps and the last step, failures included."""
    step_s: Spread
    tokens_per_step: float
    rollout_s: Spread
    """From the start of a consumed rollout to its reward."""
    phases: dict[str, float]
    """Shares of the trainer's time in steps, as in ``hpcrl report``; ``wait_batch`` is its waiting share."""
    engines_alone_s: float | None = None
    """Seconds of a step if the trainer took no time; None where too few steps were done to say it."""
    engines_wait: float | None = None
    """Share of a step that engines wait for the trainer, as defined by `hpcrl.planning.times.loop.waiting_share`."""
    engine: EngineShares
    staleness: Staleness
    started: int
    unfinished: int
    """Rollouts that run, or wait to be consumed, at the end."""
    outcomes: dict[str, int]
    """Rollouts by how they ended; with ``unfinished`` they add up to ``started``."""
    dropped_share: float
    """Ended rollouts that no kept step consumed."""
    evaluations: int
    checkpoints: int
    failures: FailureTotals
    goodput: Goodput
    kv_series: tuple[KvPoint, ...]
    step_series: tuple[StepPoint, ...]
    """Kept steps; where there are many, every so-manieth."""
    warnings: tuple[str, ...]


def summarize(simulation: Simulation) -> SimulationResult:
    """Return the document of a finished simulation."""
    scenario, tally, now = simulation.scenario, simulation.tally, simulation.clock.now
    size, bound = scenario.size, scenario.recipe.rollouts.max_off_policy_steps
    # steps belong to the start until rollouts are as old as the bound permits; a short run has only such steps
    skipped = min(bound + 1, len(tally.steps) // 4)
    steps = tally.steps[skipped:]
    began_s = tally.steps[skipped - 1].end_s if skipped else 0.0
    span_s = steps[-1].end_s - began_s if steps else 0.0
    in_steps = sum(step.seconds for step in steps)
    phases = Counter[str]()
    for step in steps:
        phases.update(step.phases_s)
    histogram = sum((step.staleness for step in steps), Counter[int]())
    consumed = histogram.total()
    ended = tally.outcomes.total()
    stride = max(1, len(tally.steps) // _POINTS)
    return SimulationResult(
        recipe=scenario.recipe.name,
        durations=scenario.durations.source,
        seed=scenario.seed,
        simulated_s=now,
        nodes=size.nodes,
        trainer_nodes=size.trainer_nodes,
        engine_nodes=size.engine_nodes,
        env_nodes=size.env_nodes,
        engines=size.engines,
        rollouts_per_step=size.groups_per_step * scenario.recipe.rollouts.group_size,
        max_in_flight=size.max_in_flight,
        thinning=scenario.thinning,
        merged_turns=scenario.merged_turns,
        engines_simulated=scenario.engines,
        mtbf_h=scenario.failures.mtbf_h,
        steps=len(tally.steps),
        skipped_steps=skipped,
        steps_per_minute=60.0 * len(steps) / span_s if span_s else 0.0,
        step_s=Spread.of([step.seconds for step in steps]),
        tokens_per_step=sum(step.tokens for step in steps) / max(1, len(steps)),
        rollout_s=Spread.of(tally.rollout_s),
        phases={name: seconds / in_steps for name, seconds in phases.items()} if in_steps else {},
        engine=_engines(simulation),
        staleness=Staleness(
            bound=bound,
            mean=sum(lag * count for lag, count in histogram.items()) / max(1, consumed),
            maximum=max(histogram, default=0),
            histogram={str(lag): histogram[lag] for lag in sorted(histogram)},
        ),
        started=tally.started,
        unfinished=simulation.unfinished,
        outcomes={outcome.value: tally.outcomes[outcome] for outcome in Outcome},
        dropped_share=1.0 - tally.outcomes[Outcome.CONSUMED] / ended if ended else 0.0,
        evaluations=tally.evaluations,
        checkpoints=tally.checkpoints,
        failures=FailureTotals(
            count=len(tally.failures),
            lost_steps=sum(failure.lost_steps for failure in tally.failures),
            lost_s=sum(failure.lost_s for failure in tally.failures),
            down_s=simulation.down_s,
            replaced=sum(failure.replaced for failure in tally.failures),
        ),
        goodput=_goodput(simulation),
        kv_series=tuple(
            KvPoint(time_s=k.time_s, mean=k.mean, highest=k.highest, running=k.running, waiting=k.waiting)
            for k in tally.kv
        ),
        step_series=tuple(_point(step) for step in tally.steps[::stride]),
        warnings=tuple(_warnings(simulation, steps, start=bound + 1 - skipped)),
    )


def _point(step: StepSample) -> StepPoint:
    return StepPoint(
        step=step.step,
        end_s=step.end_s,
        phases_s=step.phases_s,
        staleness_mean=step.staleness_mean,
        staleness_max=max(step.staleness),
        tokens=step.tokens,
    )


def _engines(simulation: Simulation) -> EngineShares:
    scenario, now = simulation.scenario, simulation.clock.now
    total_s = max(now * scenario.engines, 1e-9)
    capacity = scenario.durations.engine.kv_tokens or 1
    busy, frozen, down = simulation.busy_s / total_s, simulation.frozen_s / total_s, simulation.down_s / max(now, 1e-9)
    prefill_s = max(now * scenario.prefill_engines, 1e-9)
    return EngineShares(
        busy=busy,
        frozen=frozen,
        idle=max(0.0, 1.0 - busy - frozen - down),
        down=down,
        prefill_busy=min(1.0, simulation.prefill_busy_s / prefill_s) if scenario.prefill_engines else 0.0,
        sampled_tokens_per_s=scenario.thinning * simulation.said_tokens / max(now, 1e-9),
        preemptions=simulation.preemptions,
        kv_mean=simulation.kv_token_s / total_s / capacity,
        kv_peak=simulation.kv_peak / capacity,
    )


def _goodput(simulation: Simulation) -> Goodput:
    scenario, tally, now = simulation.scenario, simulation.tally, max(simulation.clock.now, 1e-9)
    size = scenario.size
    trained_s = sum(step.phases_s["forward_backward"] + step.phases_s["optimizer"] for step in tally.steps)
    consumed = sum(step.sampled_tokens for step in tally.steps)
    said = simulation.said_tokens * scenario.thinning
    trainer = trained_s / now
    busy = simulation.busy_s / (now * scenario.engines)
    engines = busy * min(1.0, consumed / said) if said else 0.0
    share = trainer * size.trainer_share + engines * (1.0 - size.trainer_share)
    gpu_hours = size.gpus * now / 3600.0
    return Goodput(
        trainer=trainer,
        engines=engines,
        share=share,
        node_hours=size.nodes * now / 3600.0,
        gpu_hours=gpu_hours,
        useful_gpu_hours=gpu_hours * share,
    )


def _warnings(simulation: Simulation, steps: Sequence[StepSample], start: int) -> list[str]:
    """Return warnings for the reader; ``start`` is the maximum number of steps of the start among ``steps``."""
    scenario = simulation.scenario
    warnings = []
    if not steps:
        warnings.append("no step was done in the simulated time: figures of steps are zero")
    elif start > 0:
        among = "all of them are" if start >= len(steps) else f"{start} of them are"
        warnings.append(
            f"figures are of {len(steps)} steps, and {among} of the start, when rollouts are young and engines fill up "
            "or run empty: more --days, or trainer.steps, would say what a long run does"
        )
    if scenario.thinning > 1 and scenario.recipe.rollouts.max_off_policy_steps == 0:
        warnings.append(
            f"one of {scenario.thinning:.3g} rollouts was simulated, and a synchronous step waits for the slowest of "
            "all: its waits are longer than shown; --sample 0 simulates all"
        )
    return warnings
