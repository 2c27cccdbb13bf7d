"""Packing and advantages."""

from __future__ import annotations

import random
import statistics

import pytest

from hpcrl.models.known import load_facts
from hpcrl.models.packing import training_cost
from hpcrl.rollouts.batches.advantages import group_advantages
from hpcrl.rollouts.batches.packing import pack


@pytest.mark.parametrize("seed", range(80))
def test_packing(seed: int) -> None:
    rng = random.Random(seed)
    world_size, budget = rng.randint(1, 5), rng.randint(20, 200)
    lengths = [rng.randint(1, rng.choice([10, 100, 300])) for _ in range(rng.randint(1, 80))]
    shards = pack(lengths, budget=budget, world_size=world_size)
    assert shards == pack(list(lengths), budget=budget, world_size=world_size)
    assert len(shards) == world_size
    assert len({len(micro_batches) for micro_batches in shards}) == 1
    everything = [i for micro_batches in shards for indices in micro_batches for i in indices]
    assert sorted(everything) == list(range(len(lengths)))
    for micro_batches in shards:
        for indices in micro_batches:
            assert indices == sorted(indices)
            assert sum(lengths[i] for i in indices) <= budget or len(indices) == 1
    loads = [sum(lengths[i] for indices in micro_batches for i in indices) for micro_batches in shards]
    assert max(loads) - min(loads) <= max(lengths) * len(shards[0])


def test_equal_rollouts_are_spread_evenly() -> None:
    shards = pack([10] * 64, budget=100, world_size=2)
    assert [[len(indices) for indices in micro_batches] for micro_batches in shards] == [[8] * 4] * 2


def test_no_rank_gets_the_largest_of_every_row() -> None:
    """Four micro-batches of one rollout each: 10 and 7 tokens weigh as much as 9 and 8."""
    assert pack([10, 9, 8, 7], budget=10, world_size=2) == [[[0], [3]], [[1], [2]]]


DENSE = load_facts("Qwen3-8B")


def row_balance(shards: list[list[list[int]]], costs: list[float]) -> float:
    """What ranks wait for over what they would wait for were all alike: 1 is perfect."""
    by_rank = [[sum(costs[i] for i in indices) for indices in micro_batches] for micro_batches in shards]
    return sum(map(max, zip(*by_rank, strict=True))) * len(shards) / sum(map(sum, by_rank))


def test_long_rollouts_get_fewer_others_in_their_batch() -> None:
    """Of equal tokens the one with a long rollout costs more: attention is quadratic."""
    lengths = [60_000, *[20_000] * 3, *[2_000] * 40]
    cost = training_cost(DENSE)
    costs = [cost(length) for length in lengths]
    by_tokens = pack(lengths, budget=131_072, world_size=2)
    by_cost = pack(lengths, budget=131_072, world_size=2, cost=cost)
    assert len(by_cost[0]) == len(by_tokens[0])
    assert row_balance(by_tokens, costs) > 1.1
    assert row_balance(by_cost, costs) < 1.01
    assert pack(list(lengths), budget=131_072, world_size=2, cost=cost) == by_cost


@pytest.mark.parametrize("seed", range(40))
def test_balance_by_cost_takes_no_more_micro_batches(seed: int) -> None:
    rng = random.Random(seed)
    world_size, budget = rng.randint(1, 5), rng.randint(2_000, 200_000)
    lengths = [int(rng.lognormvariate(9, 1.2)) + 1 for _ in range(rng.randint(1, 80))]
    cost = training_cost(DENSE)
    by_tokens, by_cost = (pack(lengths, budget=budget, world_size=world_size, cost=c) for c in (float, cost))
    assert len(by_cost[0]) <= len(by_tokens[0])
    for micro_batches in by_cost:
        for indices in micro_batches:
            assert sum(lengths[i] for i in indices) <= budget or len(indices) == 1
    assert sorted(i for rank in by_cost for indices in rank for i in indices) == list(range(len(lengths)))


def test_the_longest_are_packed_first() -> None:
    """In the order in which they come, the last one would find no room in two micro-batches."""
    (found,) = pack([2, 2, 2, 4, 10], budget=10, world_size=1)
    assert sorted(found) == [[0, 1, 2, 3], [4]]


def test_where_costs_would_take_one_more_micro_batch_tokens_decide() -> None:
    """28 tokens fill two micro-batches of 14 to the last one."""
    lengths = [9, 6, 4, 3, 2, 2, 2]
    (found,) = pack(lengths, budget=14, world_size=1, cost=lambda length: float(length * length))
    assert [sum(lengths[i] for i in indices) for indices in found] == [14, 14]


def test_costs_have_a_linear_and_a_quadratic_part() -> None:
    cost = training_cost(DENSE)
    linear = cost(1)
    scores = [cost(length) - length * linear for length in (10_000, 20_000)]
    assert scores[1] == pytest.approx(4 * scores[0], rel=1e-3)
    # of sparse attention only the indexer is quadratic, and it has no backward pass
    sparse = training_cost(load_facts("GLM-5"))
    assert sparse(100_000) < 15 * sparse(10_000) < cost(100_000) / cost(10_000) * sparse(10_000)


def test_a_rank_without_data_has_empty_micro_batches() -> None:
    assert pack([5], budget=10, world_size=3) == [[[0]], [[]], [[]]]


def reference(rewards: list[float], *, divide: bool) -> list[float]:
    mean = sum(rewards) / len(rewards)
    std = statistics.pstdev(rewards)
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    return [(reward - mean) / (std + 1e-6) if divide else reward - mean for reward in rewards]


@pytest.mark.parametrize("seed", range(20))
def test_advantages_against_a_plain_reference(seed: int) -> None:
    rng = random.Random(seed)
    rewards = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(rng.randint(1, 16))]
    assert group_advantages(rewards, [1] * len(rewards), "grpo").tolist() == pytest.approx(
        reference(rewards, divide=True), abs=1e-12
    )
    plain = reference(rewards, divide=False)
    assert group_advantages(rewards, [1] * len(rewards), "mean_baseline").tolist() == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3])
def test_equal_rewards_have_no_advantage_at_all(reward: float) -> None:
    assert group_advantages([reward] * 7, [1] * 7, "grpo").tolist() == [0.0] * 7
