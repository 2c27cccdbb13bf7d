"""The adaptive limit: alone against a simulated engine, and in a run with engines that say they are full."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from harness import make_run, running
from stub_engine import StubEngine

from hpcrl.config.recipe import AdaptiveConcurrencyConfig
from hpcrl.rollouts.engines.concurrency import AdaptiveLimit, Pressure
from hpcrl.rollouts.telemetry import fleet_watch

CONFIG = AdaptiveConcurrencyConfig(enabled=True)


class SimulatedEngine:
    """Rollouts that grow by a token a tick up to their length, in KV for so many tokens.

    Where KV runs out, the youngest gives all of its KV back and begins again when there is room, as in vLLM.
    """

    def __init__(self, kv_tokens: int, lengths: list[int]) -> None:
        self._kv, self._lengths, self._number = kv_tokens, lengths, 0
        self._running: list[list[int]] = []
        self._waiting: list[list[int]] = []
        self.preemptions = self.finished = self.recomputed = 0

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    def add(self) -> None:
        self._waiting.append([0, self._lengths[self._number % len(self._lengths)]])
        self._number += 1

    def tick(self) -> None:
        used = sum(tokens for tokens, _ in self._running)
        while self._waiting and used + len(self._running) + self._waiting[0][0] + 1 <= self._kv:
            self._running.append(self._waiting.pop(0))
            used += self._running[-1][0]
        for rollout in self._running:
            rollout[0] += 1
        while sum(tokens for tokens, _ in self._running) > self._kv:
            victim = self._running.pop()
            self.recomputed += victim[0]
            self._waiting.insert(0, [0, victim[1]])
            self.preemptions += 1
        done = [rollout for rollout in self._running if rollout[0] >= rollout[1]]
        self._running = [rollout for rollout in self._running if rollout[0] < rollout[1]]
        self.finished += len(done)

    def pressure(self) -> Pressure:
        usage = sum(tokens for tokens, _ in self._running) / self._kv
        return Pressure(len(self._running), len(self._waiting), usage, self.preemptions)


def simulate(limit: AdaptiveLimit | int, engine: SimulatedEngine, *, looks: int, group: int = 8) -> list[int]:
    """Keep the engine as full as the limit says; a look every 20 ticks. Returns the limits."""
    limits = []
    for tick in range(20 * looks):
        most = limit if isinstance(limit, int) else limit.limit
        while engine.in_flight + group <= most:
            for _ in range(group):
                engine.add()
        engine.tick()
        if tick % 20 == 19 and not isinstance(limit, int):
            limit.look({"engine": engine.pressure()}, engine.in_flight)
            limits.append(limit.limit)
    return limits


#: KV for 40 rollouts of usual length half-way; some are four times as long
LENGTHS = [100, 100, 120, 80, 100, 400, 90, 110]
KV = 4000


def test_it_finds_the_knee_and_stays_there() -> None:
    limit = AdaptiveLimit(CONFIG, least=8, most=512)
    engine = SimulatedEngine(KV, LENGTHS)
    limits = simulate(limit, engine, looks=400)
    late = limits[120:]
    assert max(late) < 128, "a quarter of the bound, from which it began"
    assert min(late) >= 16
    # no wide swings: 90 % of the limits are within a factor of two
    spread = statistics.quantiles(late, n=20)
    assert spread[-1] <= 2.0 * spread[0]


def test_it_costs_less_than_a_limit_that_is_too_high_or_too_low() -> None:
    def done(limit: AdaptiveLimit | int) -> SimulatedEngine:
        engine = SimulatedEngine(KV, LENGTHS)
        simulate(limit, engine, looks=400)
        return engine

    found, high, low = done(AdaptiveLimit(CONFIG, least=8, most=512)), done(512), done(8)
    best = max(done(fixed).finished for fixed in (16, 24, 32, 40, 48, 56, 64))
    assert found.finished > 0.85 * best
    assert found.finished > 2 * low.finished
    assert found.recomputed < 0.25 * high.recomputed


def test_it_never_falls_below_one_group_whatever_engines_say() -> None:
    limit = AdaptiveLimit(CONFIG, least=8, most=512)
    for look in range(200):
        cuts = limit.look({0: Pressure(4, 100, 1.0, look), 1: Pressure(4, 100, 1.0, look)}, in_flight=4)
        assert limit.limit >= 8
    assert cuts
    assert limit.limit == 8


def test_a_cut_is_not_repeated_before_it_has_taken_effect() -> None:
    limit = AdaptiveLimit(CONFIG, least=8, most=100)
    full = {0: Pressure(100, 0, 0.99, 0)}
    (cut,) = limit.look(full, in_flight=100)
    assert (cut.engine, limit.limit, cut.why) == (0, 80, "KV is 99% full")
    for _ in range(10):
        assert limit.look(full, in_flight=90) == []
    assert limit.limit == 80
    limit.look(full, in_flight=80)
    assert limit.limit == 64


def test_what_is_not_used_is_not_grown_and_a_cut_counts_from_what_is_used() -> None:
    limit = AdaptiveLimit(CONFIG, least=8, most=1000)
    limit.look({0: Pressure(93, 0, 0.99, 0)}, in_flight=93)
    assert limit.limit == 80
    idle = {0: Pressure(20, 0, 0.2, 0)}
    limit.look(idle, in_flight=20)  # staleness holds rollouts back, not the limit
    assert limit.limit == 80
    limit.look(idle, in_flight=80)
    assert limit.limit == 85
    limit.look({0: Pressure(80, 0, 0.9, 0)}, in_flight=85)  # between kv_low and kv_high it rests
    assert limit.limit == 85


def test_a_queue_is_one_when_it_lasts() -> None:
    limit = AdaptiveLimit(CONFIG, least=4, most=100)
    queue = {0: Pressure(10, 8, 0.5, 0)}
    assert [bool(limit.look(queue, in_flight=100)) for _ in range(3)] == [False, False, True]


def test_engines_come_with_the_window_of_the_others_and_leave_with_theirs() -> None:
    limit = AdaptiveLimit(CONFIG, least=4, most=120)
    one, two, three = (Pressure(30, 0, 0.9, 0) for _ in range(3))
    limit.look({1: one, 2: two, 3: three}, in_flight=120)
    assert limit.limit == 120
    limit.look({1: one, 2: two}, in_flight=80)
    assert limit.limit == 80
    limit.look({1: Pressure(40, 0, 0.99, 0), 2: Pressure(40, 0, 0.99, 0)}, in_flight=80)
    assert limit.limit == 64
    limit.look({1: one, 2: two, 3: None}, in_flight=64)
    assert limit.limit == 96
    limit.look({}, in_flight=0)  # none serves: what comes first begins anew
    assert limit.limit == 120


def test_an_engine_that_was_started_anew_has_not_preempted() -> None:
    limit = AdaptiveLimit(CONFIG, least=4, most=100)
    limit.look({0: Pressure(10, 0, 0.9, 50)}, in_flight=100)
    assert limit.look({0: Pressure(10, 0, 0.9, 0)}, in_flight=100) == []
    (cut,) = limit.look({0: Pressure(10, 0, 0.9, 2)}, in_flight=100)
    assert cut.why == "2 requests lost their KV to others (preemption)"


@pytest.mark.parametrize("enabled", [False, True])
async def test_in_a_run_the_limit_follows_the_engines(tmp_path: Path, monkeypatch: Any, enabled: bool) -> None:
    """Two engines that say they can run eight requests each; the recipe would put 64 in flight."""
    monkeypatch.setattr(fleet_watch, "LOOK_S", 0.05)
    one, two = StubEngine(), StubEngine()
    one.request_s = two.request_s = 0.1
    one.slots = two.slots = 8
    rollouts = {"max_in_flight": 64, "max_off_policy_steps": 100, "adaptive_concurrency": {"enabled": enabled}}
    async with running(make_run(tmp_path, rollouts=rollouts), one, two) as loop:
        scheduler = loop.parts.scheduler
        await loop.train(1, 20)
        cuts = loop.events("rollouts.limit_cut")
        if not enabled:
            assert (scheduler.limit, cuts) == (64, [])
            return
        assert 4 <= scheduler.limit <= 32
        assert {cut.data["engine"] for cut in cuts} == {"engine-0", "engine-1"}
        assert all(cut.data["why"] for cut in cuts)
        one.most_in_flight = two.most_in_flight = 0
        await loop.train(21, 30)
        assert one.most_in_flight + two.most_in_flight <= 40
        assert f"hpcrl_rollouts_in_flight_limit {scheduler.limit}" in loop.orchestrator.metrics()
        counters = loop.parts.counters
        assert counters.dropped_engine + counters.dropped_group + counters.dropped_environment == 0


async def test_staleness_stays_the_upper_bound(tmp_path: Path, monkeypatch: Any) -> None:
    """The limit begins at what staleness can ever admit, and admission asks the account all the same."""
    monkeypatch.setattr(fleet_watch, "LOOK_S", 0.05)
    rollouts = {"max_in_flight": 4096, "max_off_policy_steps": 1, "adaptive_concurrency": {"enabled": True}}
    stub = StubEngine()
    stub.request_s = 0.05
    async with running(make_run(tmp_path, rollouts=rollouts), stub) as loop:
        shards = await loop.train(1, 5)
        assert loop.parts.scheduler.limit == 32  # (1 + 1) * rollouts_per_step
        assert stub.most_in_flight <= 32
        assert max(shard.stats.staleness_max for shard in shards) <= 1
