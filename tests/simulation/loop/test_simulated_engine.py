"""One simulated engine against closed forms."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from hpcrl.simulation.inputs.durations import TurnPlan
from hpcrl.simulation.loop.clock import Clock
from hpcrl.simulation.loop.engine import EngineCosts, SimulatedEngine
from hpcrl.simulation.loop.records import Group, Rollout
from hpcrl.simulation.loop.simulated_fleet import PrefillPool

BASE, PER_SEQUENCE, PREFILL = 0.01, 0.001, 0.0001


class Bench:
    """An engine, and when its requests ended."""

    def __init__(self, *, kv_tokens: float = inf, max_num_seqs: int = 64, batch_tokens: int = 2048) -> None:
        self.clock = Clock()
        costs = EngineCosts(BASE, PER_SEQUENCE, 0.0, PREFILL, max_num_seqs, batch_tokens, kv_tokens)
        self.engine = SimulatedEngine(0, self.clock, costs, replied=self._replied, first_token=lambda _: None)
        self.ended: dict[Rollout, float] = {}

    def _replied(self, rollout: Rollout) -> None:
        self.ended[rollout] = self.clock.now

    def ask(self, at_s: float, prompt: int, sampled: int) -> Rollout:
        rollout = Rollout(Group(0, 0), (TurnPlan(0.0, prompt, sampled),), 0.0, self.engine)
        rollout.context, rollout.remaining = prompt, sampled
        self.clock.at(at_s, self.engine.submit, rollout)
        return rollout

    def run(self) -> None:
        self.clock.run(1e9)
        self.engine.settle()


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    bench = Bench()
    rollout = bench.ask(0.0, 100, 50)
    bench.run()
    # the step that computes the prompt says the first token
    first = BASE + 100 * PREFILL
    assert bench.ended[rollout] == pytest.approx(first + 49 * (BASE + PER_SEQUENCE))
    assert bench.engine.busy_s == pytest.approx(bench.ended[rollout])


def test_a_batch_shares_its_steps() -> None:
    bench = Bench()
    rollouts = [bench.ask(0.0, 1, 1000) for _ in range(8)]
    bench.run()
    alone = 1000 * (BASE + 8 * PER_SEQUENCE)
    assert max(bench.ended[r] for r in rollouts) == pytest.approx(alone, rel=0.01)


def test_sequences_beyond_the_batch_wait() -> None:
    bench = Bench(max_num_seqs=1)
    first, second = bench.ask(0.0, 1, 100), bench.ask(0.0, 1, 100)
    bench.run()
    assert bench.ended[second] == pytest.approx(2 * bench.ended[first], rel=0.02)


def test_who_joins_later_slows_the_rest_of_the_first() -> None:
    bench = Bench()
    first, second = bench.ask(0.0, 1, 1000), bench.ask(5.0, 1, 1000)
    bench.run()
    alone, shared = BASE + PER_SEQUENCE, BASE + 2 * PER_SEQUENCE
    said = 5.0 / alone
    assert bench.ended[first] == pytest.approx(5.0 + (1000 - said) * shared, rel=0.01)
    assert bench.ended[second] == pytest.approx(bench.ended[first] + said * alone, rel=0.01)


def test_frozen_time_is_added() -> None:
    bench = Bench()
    rollout = bench.ask(0.0, 1, 100)
    bench.clock.at(0.3, lambda _: bench.engine.freeze())
    bench.clock.at(2.3, lambda _: bench.engine.thaw())
    bench.run()
    assert bench.ended[rollout] == pytest.approx(2.0 + BASE + PREFILL + 99 * (BASE + PER_SEQUENCE))
    assert bench.engine.frozen_s == pytest.approx(2.0)


def test_kv_is_never_exceeded_and_all_requests_end() -> None:
    rng = Random(1)
    bench = Bench(kv_tokens=500)
    rollouts = [bench.ask(rng.random() * 5, rng.randint(1, 200), rng.randint(1, 250)) for _ in range(200)]
    bench.run()
    assert set(bench.ended) == set(rollouts)
    assert bench.engine.preemptions > 0
    assert bench.engine.kv_peak <= 500 * (1 + 1e-6)


def test_kv_is_accounted_to_zero() -> None:
    bench = Bench(kv_tokens=5000)
    rollouts = [bench.ask(i * 0.1, 50, 100) for i in range(30)]
    bench.run()
    for rollout in rollouts:
        bench.engine.release(rollout)
    assert bench.engine.kv_in_use == pytest.approx(0.0, abs=1e-6)


def test_a_long_prompt_is_cut_into_steps_that_decode_too() -> None:
    bench = Bench(batch_tokens=101)
    talker = bench.ask(0.0, 1, 1000)
    prompt = bench.ask(1.0, 10_000, 1)
    bench.run()
    # 100 prompt tokens fit beside the talker: 100 steps
    assert bench.ended[prompt] - 1.0 == pytest.approx(100 * (BASE + PER_SEQUENCE + 100 * PREFILL), rel=0.02)
    steps = 100 * 100 * PREFILL
    # one sequence all the time, and the prompt's work on top
    assert bench.ended[talker] == pytest.approx(1000 * (BASE + PER_SEQUENCE) + steps, rel=0.02)


def test_aborted_requests_never_answer() -> None:
    bench = Bench()
    doomed, other = bench.ask(0.0, 1, 100), bench.ask(0.0, 1, 100)
    bench.clock.at(0.5, bench.engine.abort, doomed)
    bench.run()
    assert set(bench.ended) == {other}
    assert bench.engine.running == bench.engine.waiting == 0


def test_prefill_engines_are_an_m_d_1_queue() -> None:
    """Mean wait of random arrivals at one server of fixed service time: rho * s / (2 (1 - rho))."""
    bench, rng = Bench(), Random(7)
    service, load, count = 1.0, 0.7, 40_000
    pool = PrefillPool(bench.clock, servers=1, per_token_s=service / 100, per_request_s=0.0)
    delays: list[float] = []
    asked: dict[Rollout, float] = {}
    bench.engine.submit = lambda rollout, computed: delays.append(bench.clock.now - asked[rollout])  # type: ignore[method-assign]
    now = 0.0

    def arrive(rollout: Rollout) -> None:
        asked[rollout] = bench.clock.now
        pool.submit(rollout)

    for _ in range(count):
        now += rng.expovariate(load / service)
        rollout = Rollout(Group(0, 0), (TurnPlan(0.0, 100, 1),), 0.0, bench.engine)
        rollout.context = 100
        bench.clock.at(now, arrive, rollout)
    bench.run()
    wait = sum(delays) / count - service
    assert len(delays) == count
    assert wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)
