"""The asynchronous loop in its steady state: an estimate by Little's law. The simulator does it event by event."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hpcrl.config.recipe import Recipe
from hpcrl.planning.lengths import Quantiles, expected_later

_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class ServedRate:
    """Service of engines for a number of rollouts in flight.

    Attributes
    ----------
    durations:
        Seconds of a rollout.
    rate:
        Rollouts that end a second: in flight over the mean duration.
    batch:
        Sequences that a data-parallel rank decodes at once.
    token_s:
        Seconds of a sampled token.
    limit:
        Bottleneck of engines: ``decode``, ``prefill`` or ``slots`` (``max_num_seqs``).
    """

    durations: Quantiles
    rate: float
    batch: float
    token_s: float
    limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopInputs:
    """Inputs of the estimate of the loop.

    Attributes
    ----------
    rollouts_per_step, group_size, max_in_flight, max_off_policy_steps, ready_batches:
        Values of the recipe.
    places_by:
        The setting that ``max_in_flight`` comes from, where that is not the one of this name.
    trainer_s:
        Seconds of the trainer a step, including published weights and checkpoints.
    handoff_s:
        Seconds from the end of a step until engines serve its weights.
    pause_s:
        Seconds that an engine is paused for an update.
    serve:
        Returns the service of engines for a number of rollouts in flight, on GPUs of their own.
    same_gpus:
        Engines have the trainer's GPUs: while one side computes the other waits.
    """

    rollouts_per_step: int
    group_size: int
    max_in_flight: int
    max_off_policy_steps: int
    trainer_s: float
    handoff_s: float
    pause_s: float
    serve: Callable[[float], ServedRate]
    ready_batches: int = 1
    places_by: str = "max_in_flight"
    same_gpus: bool = False

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        serve: Callable[[float], ServedRate],
        *,
        trainer_s: float,
        handoff_s: float,
        load_s: float,
        places: tuple[int, str] | None = None,
        same_gpus: bool = False,
    ) -> LoopInputs:
        """Read the loop of a recipe.

        Parameters
        ----------
        load_s:
            Seconds to load a version; engines are paused for this time where requests stay.
        places:
            Rollouts that may be in flight and the setting that says so, where ``max_in_flight`` is not all that does
            (`hpcrl.planning.routes`).
        same_gpus:
            ``serve`` is of GPUs that the trainer does not use meanwhile, and it does.
        """
        rollouts = recipe.rollouts
        return cls(
            rollouts_per_step=rollouts.rollouts_per_step,
            group_size=rollouts.group_size,
            max_in_flight=rollouts.max_in_flight if places is None else places[0],
            max_off_policy_steps=rollouts.max_off_policy_steps,
            ready_batches=rollouts.ready_batches,
            trainer_s=trainer_s,
            handoff_s=handoff_s,
            pause_s=load_s if recipe.engine.pause == "keep" else 0.0,
            serve=serve,
            places_by="max_in_flight" if places is None else places[1],
            same_gpus=same_gpus,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEstimate:
    """Loop in its steady state.

    Attributes
    ----------
    step_s:
        Seconds of a step.
    trainer_s, rollout_s:
        Seconds that trainer and engines need for a step's work, each alone.
    in_flight:
        Rollouts in flight: those that start in a second times the mean of their durations (Little's law), at the pace
        of ``step_s``.
    in_flight_limit:
        Setting that limits them: ``max_in_flight``, ``rollouts.routes_in_flight_gib``, ``max_off_policy_steps``;
        ``trainer`` where more would only wait for it.
    trainer_waits, engines_wait:
        Excess of a step over the time of each side alone, as shares of the step (`waiting_share`).
    staleness:
        Mean staleness of a consumed rollout.
    dropped:
        Share of rollouts that take longer than the bound allows.
    bound:
        The slower side: ``trainer`` or ``rollouts``.
    served:
        Engines at this point.
    """

    step_s: float
    trainer_s: float
    rollout_s: float
    in_flight: float
    in_flight_limit: str
    trainer_waits: float
    engines_wait: float
    staleness: float
    dropped: float
    bound: str
    served: ServedRate

    @property
    def started_per_s(self) -> float:
        """Return the rollouts that start in a second."""
        return self.in_flight / self.served.durations.mean


def waiting_share(alone_s: float, step_s: float) -> float:
    """Return the share of a step that a side waits for the other: the saving if the other side took no time.

    Plans and simulations use this one definition of waiting. Engines that wait in this sense are not empty: they serve
    fewer requests at once than they could, or finish rollouts that are not consumed yet.
    """
    return max(0.0, 1.0 - alone_s / step_s) if step_s else 0.0


def steady_state(inputs: LoopInputs) -> LoopEstimate:
    """Estimate the loop.

    With ``X`` rollouts a second, ``X E[D]`` are in flight (Little). They are at most ``max_in_flight``; and a group
    holds its place under the staleness bound until its last member ends, so ``X E[max of g] / g`` groups run, at most
    ``(η + 1) B`` less those that wait to be consumed (half a batch on average) and less what engines serve late.

    On the same GPUs the work of both sides takes turns: a step takes the sum of what each needs alone, and rollouts
    take longer in that ratio.
    """
    if inputs.max_off_policy_steps == 0:
        return _synchronous(inputs)
    r, g = inputs.rollouts_per_step, inputs.group_size
    # a group starts when all of its places are free
    most = max(float(g), inputs.max_in_flight - (g - 1) / 2)
    in_flight, limit, step_s, dropped = most, inputs.places_by, 0.0, 0.0
    served = inputs.serve(in_flight)
    for _ in range(_ROUNDS):
        alive = 1.0 - min(0.5, inputs.pause_s / step_s) if step_s else 1.0
        longest = served.durations.largest_of(g)
        rate = served.rate * alive * (1.0 - dropped)
        rollout_s = r / rate
        new_step = rollout_s + inputs.trainer_s if inputs.same_gpus else max(rollout_s, inputs.trainer_s)
        late = min(inputs.handoff_s / new_step, inputs.max_off_policy_steps)
        room = (inputs.max_off_policy_steps + 0.5 - late) * r * served.durations.mean / longest
        bounded = max(float(g), min(most, room))
        limit = "max_off_policy_steps" if room < most else inputs.places_by
        # in seconds of engines that compute all the time
        served_s = rollout_s if inputs.same_gpus else new_step
        dropped = 0.5 * (dropped + min(0.5, _too_old(served.durations, g, inputs.max_off_policy_steps, served_s)))
        # half steps: durations depend on the number in flight, and vice versa
        moved = 0.5 * (in_flight + bounded)
        settled = abs(moved - in_flight) < 1e-3 * in_flight and abs(new_step - step_s) < 1e-3 * new_step
        in_flight, step_s = moved, new_step
        if settled:
            break
        served = inputs.serve(in_flight)
    if inputs.same_gpus:
        step_s = rollout_s + inputs.trainer_s
        alive *= rollout_s / step_s
    else:
        deviation = rollout_s / math.sqrt(r / g * (1 + inputs.max_off_policy_steps))
        step_s = expected_later(inputs.trainer_s, rollout_s, deviation)
    # engines work no faster than rollouts are consumed: other places are held by groups that have ended and wait
    consumed = r / step_s / alive / (1.0 - dropped)
    if served.rate > consumed * 1.001:
        in_flight, served = _at_pace(inputs.serve, consumed, in_flight, served)
        limit = "trainer" if inputs.trainer_s > rollout_s else limit
    if alive < 1.0:
        pauses = 1.0 / alive
        slower = served.durations.mapped(lambda value: value * pauses)
        served = replace(served, durations=slower, rate=served.rate * alive)
    return _estimate(
        inputs, served, step_s=step_s, rollout_s=rollout_s, in_flight=in_flight, limit=limit, dropped=dropped
    )


def _at_pace(
    serve: Callable[[float], ServedRate], rate: float, most: float, served: ServedRate
) -> tuple[float, ServedRate]:
    """Return the number in flight that gives ``rate`` rollouts a second, with its service; ``most`` give ``served``.

    Little's law is iterated to its fixed point: with fewer in flight each takes less time, which makes them fewer.
    """
    in_flight = most
    for _ in range(_ROUNDS):
        fewer = min(most, rate * served.durations.mean)
        settled = abs(fewer - in_flight) < 1e-3 * in_flight
        in_flight, served = fewer, serve(fewer)
        if settled:
            break
    return in_flight, served


def _synchronous(inputs: LoopInputs) -> LoopEstimate:
    """Return the loop whose rollouts start with the version and end before the step: the longest one counts."""
    r = inputs.rollouts_per_step
    together = float(min(r, inputs.max_in_flight))
    served = inputs.serve(together)
    longest = served.durations.largest_of(r)
    # rollouts without a place at first wait for one
    rollout_s = longest + max(0.0, r - together) / served.rate
    step_s = inputs.trainer_s + inputs.handoff_s + rollout_s
    mean_in_flight = r * served.durations.mean / step_s
    return _estimate(
        inputs,
        served,
        step_s=step_s,
        rollout_s=rollout_s,
        in_flight=mean_in_flight,
        limit="max_off_policy_steps",
        dropped=0.0,
    )


def _too_old(durations: Quantiles, group: int, bound: int, step_s: float) -> float:
    """Share of groups whose longest member outlives the bound."""
    return 1.0 - (1.0 - durations.above((bound + 1) * step_s)) ** group


def _kept_s(durations: Quantiles, group: int, limit_s: float) -> float:
    """Return the mean seconds of the groups that do not outlive the bound."""
    kept = [value for value in durations.largest(group).values if value <= limit_s]
    return sum(kept) / len(kept) if kept else limit_s


def _age_in_bursts(inputs: LoopInputs) -> float:
    """Return the staleness where rollouts are short compared with a step, and the trainer is slower.

    Rollouts start only when fewer than ``ready_batches`` wait, and then in all places: batches of one version, which
    are consumed one a step after those that wait.
    """
    before = inputs.ready_batches - 1
    places = inputs.max_in_flight / inputs.rollouts_per_step
    burst = max(1.0, min(places, float(inputs.max_off_policy_steps - before)))
    return before + (burst + 1.0) / 2.0


def _estimate(
    inputs: LoopInputs,
    served: ServedRate,
    *,
    step_s: float,
    rollout_s: float,
    in_flight: float,
    limit: str,
    dropped: float,
) -> LoopEstimate:
    trainer_bound = inputs.trainer_s > rollout_s
    bound = inputs.max_off_policy_steps
    # half a batch waits on average; where the trainer is slower, groups start until the limit of waiting batches
    waiting = inputs.ready_batches * step_s if trainer_bound else step_s / 2
    age = (
        _kept_s(served.durations, inputs.group_size, (bound + 1) * step_s) + waiting + inputs.handoff_s
    ) / step_s - 0.5
    if trainer_bound:
        age = max(age, _age_in_bursts(inputs))
    return LoopEstimate(
        step_s=step_s,
        trainer_s=inputs.trainer_s,
        rollout_s=rollout_s,
        in_flight=in_flight,
        in_flight_limit=limit,
        trainer_waits=waiting_share(inputs.trainer_s, step_s),
        engines_wait=waiting_share(rollout_s, step_s),
        staleness=0.0 if bound == 0 else min(float(bound), max(0.0, age)),
        dropped=dropped,
        bound="trainer" if trainer_bound else "rollouts",
        served=served,
    )
