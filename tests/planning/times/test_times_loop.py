"""The steady state of the loop against a small simulation of the same rules, event by event."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from statistics import mean
from typing import Any

import pytest

from hpcrl.planning.distributions import LogNormal, quantiles_of
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.times.loop import LoopEstimate, LoopInputs, ServedRate, steady_state


def simulate(
    durations: Quantiles, *, groups: int, size: int, most: int, bound: int, trainer_s: float, ready: int = 1
) -> tuple[float, float]:
    """Mean step and staleness over many, with the orchestrator's rules; engines serve any number at once."""
    rng = random.Random(0)
    now, step, trained_at, number, busy = 0.0, 0, 0.0, 0, False
    ends: list[tuple[float, int]] = []
    taken: list[float] = []
    staleness: list[int] = []
    waiting: list[int] = []
    running: dict[int, tuple[int, int]] = {}  # version, members left
    while len(taken) < 400:
        while True:
            version = step - busy
            room = (bound + version + 1) * groups - (step * groups + len(waiting) + len(running))
            in_flight = sum(left for _, left in running.values())
            if room <= 0 or in_flight + size > most or len(waiting) >= ready * groups:
                break
            running[number] = (version, size)
            for _ in range(size):
                heapq.heappush(ends, (now + rng.choice(durations.values), number))
            number += 1
        if not busy and len(waiting) >= groups:
            waiting = sorted(waiting)
            staleness += [step - version for version in waiting[:groups]]
            waiting = waiting[groups:]
            step += 1
            # what cannot be used any more is cancelled
            waiting = [v for v in waiting if v >= step - bound]
            running = {n: state for n, state in running.items() if state[0] >= step - bound}
            busy, trained_at = True, now + trainer_s
            continue
        if busy and (not ends or trained_at <= ends[0][0]):
            now, busy = trained_at, False
            taken.append(now)
            continue
        now, which = heapq.heappop(ends)
        if which not in running:
            continue
        version, left = running[which]
        if left > 1:
            running[which] = (version, left - 1)
            continue
        del running[which]
        if version >= step - bound:
            waiting.append(version)
    return mean(b - a for a, b in itertools.pairwise(taken)), mean(staleness[len(staleness) // 4 :])


def whole_estimate(
    durations: Quantiles, *, groups: int, size: int, most: int, bound: int, trainer_s: float, ready: int = 1
) -> LoopEstimate:
    inputs = LoopInputs(
        rollouts_per_step=groups * size,
        group_size=size,
        max_in_flight=most,
        max_off_policy_steps=bound,
        trainer_s=trainer_s,
        handoff_s=0.0,
        pause_s=0.0,
        serve=lambda n: ServedRate(durations, n / durations.mean, n, 0.0, "in flight"),
        ready_batches=ready,
    )
    return steady_state(inputs)


def estimate(durations: Quantiles, **setting: Any) -> float:
    return whole_estimate(durations, **setting).step_s


@pytest.mark.parametrize(
    ("sigma", "most", "bound", "trainer_s", "within"),
    [
        (0.5, 128, 4, 1.0, 0.12),  # in flight
        (1.0, 128, 4, 1.0, 0.15),
        (0.5, 4096, 2, 1.0, 0.15),  # staleness
        (1.0, 4096, 4, 1.0, 0.15),
        (0.5, 512, 8, 30.0, 0.05),  # trainer
        (0.5, 64, 0, 5.0, 0.10),  # synchronous
        (1.0, 64, 0, 5.0, 0.10),
    ],
)
def test_the_estimate_is_near_a_simulation(
    sigma: float, most: int, bound: int, trainer_s: float, within: float
) -> None:
    durations = quantiles_of(LogNormal(kind="lognormal", median=10.0, sigma=sigma))
    setting = {"groups": 8, "size": 8, "most": most, "bound": bound, "trainer_s": trainer_s}
    assert estimate(durations, **setting) == pytest.approx(simulate(durations, **setting)[0], rel=within)  # type: ignore[arg-type]


def taking_turns(trainer_s: float, rollout_s: float, *, waiting: int, steps: int = 200) -> float:
    """Return the seconds of a step of two programs on one device, each at half its pace while the other computes.

    The engine makes batches until ``waiting`` of them wait.
    """
    ready, made, left, taken, at, tick = 0, 0.0, 0.0, 0, 0.0, 0.01
    while taken < steps:
        if left <= 0 and ready:
            ready, left, taken = ready - 1, trainer_s, taken + 1
        trains, serves = left > 0, ready < waiting
        pace = tick / 2 if trains and serves else tick
        at += tick
        left -= pace if trains else 0.0
        made += pace if serves else 0.0
        if made >= rollout_s:
            made, ready = made - rollout_s, ready + 1
    return at / steps


@pytest.mark.parametrize(("trainer_s", "rollout_s"), [(10.0, 10.0), (2.0, 20.0), (20.0, 2.0)])
def test_on_the_same_gpus_a_step_is_the_work_of_both(trainer_s: float, rollout_s: float) -> None:
    durations = Quantiles.of([rollout_s])
    inputs = LoopInputs(
        rollouts_per_step=64,
        group_size=8,
        max_in_flight=64,
        max_off_policy_steps=3,
        trainer_s=trainer_s,
        handoff_s=0.0,
        pause_s=0.0,
        # engines that compute all the time end 64 rollouts in `rollout_s`
        serve=lambda n: ServedRate(durations, 64 / rollout_s, n, 0.0, "decode"),
        same_gpus=True,
    )
    found = steady_state(inputs)
    assert found.step_s == pytest.approx(taking_turns(trainer_s, rollout_s, waiting=2), rel=0.03)
    # as long as a step: rollouts wait for the trainer's kernels, too
    assert found.served.durations.mean == pytest.approx(found.step_s)
    assert (found.trainer_s, found.rollout_s) == (trainer_s, rollout_s)
    assert found.step_s > 1.05 * steady_state(dataclasses.replace(inputs, same_gpus=False)).step_s


def test_a_long_tail_costs_the_synchronous_loop_most() -> None:
    tail = Quantiles.of([1.0] * 90 + [10.0] * 10)
    setting = {"groups": 4, "size": 8, "most": 160, "trainer_s": 0.5}
    synchronous = estimate(tail, bound=0, **setting)  # type: ignore[arg-type]
    asynchronous = estimate(tail, bound=4, **setting)  # type: ignore[arg-type]
    assert synchronous > 10.0
    assert synchronous / asynchronous > 3.0


def test_rollouts_that_outlive_the_bound_are_counted() -> None:
    durations = Quantiles.of([1.0] * 99 + [1000.0])
    inputs = LoopInputs(
        rollouts_per_step=64,
        group_size=8,
        max_in_flight=256,
        max_off_policy_steps=1,
        trainer_s=5.0,
        handoff_s=0.0,
        pause_s=0.0,
        serve=lambda n: ServedRate(durations, n / durations.mean, n, 0.0, "in flight"),
    )
    assert 0.03 < steady_state(inputs).dropped < 0.15


#: of log-normal rollouts: sigma, and of the loop: places, bound, seconds of the trainer, batches that may wait
REGIMES = [
    (0.5, 512, 8, 30.0, 1),  # the trainer, short rollouts: they come in bursts
    (0.5, 512, 8, 30.0, 3),
    (1.0, 4096, 8, 10.0, 3),  # the trainer, rollouts of several steps
    (0.5, 4096, 8, 6.0, 3),
    (0.5, 4096, 8, 6.0, 1),
    (0.5, 4096, 3, 30.0, 8),  # the trainer, all at the bound
    (0.5, 128, 4, 1.0, 1),  # in flight
    (1.0, 4096, 4, 1.0, 1),  # staleness
    (0.5, 64, 0, 5.0, 1),  # synchronous
]


@pytest.mark.parametrize(("sigma", "most", "bound", "trainer_s", "ready"), REGIMES)
def test_rollouts_in_flight_obey_littles_law_at_the_printed_step(
    sigma: float, most: int, bound: int, trainer_s: float, ready: int
) -> None:
    setting = {"groups": 8, "size": 8, "most": most, "bound": bound, "trainer_s": trainer_s, "ready": ready}
    loop = whole_estimate(quantiles_of(LogNormal(kind="lognormal", median=10.0, sigma=sigma)), **setting)  # type: ignore[arg-type]
    started_per_s = 64 / loop.step_s / (1.0 - loop.dropped)
    assert loop.in_flight == pytest.approx(started_per_s * loop.served.durations.mean, rel=0.005)
    assert loop.started_per_s == pytest.approx(started_per_s, rel=0.005)


@pytest.mark.parametrize(("sigma", "most", "bound", "trainer_s", "ready"), REGIMES)
def test_staleness_is_near_a_simulation(sigma: float, most: int, bound: int, trainer_s: float, ready: int) -> None:
    durations = quantiles_of(LogNormal(kind="lognormal", median=10.0, sigma=sigma))
    setting = {"groups": 8, "size": 8, "most": most, "bound": bound, "trainer_s": trainer_s, "ready": ready}
    assert whole_estimate(durations, **setting).staleness == pytest.approx(  # type: ignore[arg-type]
        simulate(durations, **setting)[1],  # type: ignore[arg-type]
        rel=0.12,
    )


def test_pauses_of_engines_are_in_the_durations() -> None:
    durations = Quantiles.of([100.0] * 10)
    inputs = LoopInputs(
        rollouts_per_step=64,
        group_size=8,
        max_in_flight=64,
        max_off_policy_steps=4,
        trainer_s=10.0,
        handoff_s=10.0,
        pause_s=10.0,
        serve=lambda n: ServedRate(durations, n / durations.mean, n, 0.0, "in flight"),
    )
    loop = steady_state(inputs)
    assert loop.served.durations.mean > 105.0
    assert loop.in_flight == pytest.approx(64 / loop.step_s * loop.served.durations.mean, rel=0.005)
