"""How evenly batches are packed: rollouts balanced by tokens alone, and by what training on them costs.

Ranks run micro-batches in step, so a batch takes as long as the rank with the most work in each row of them. Printed is
that over the mean, before and after: 1 is perfect, and nothing can be below what one rollout that is longer than a
rank's share dictates (``floor``).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from harness import record

from hpcrl.models.known import load_facts
from hpcrl.models.packing import training_cost
from hpcrl.rollouts.batches.packing import pack

BUDGET = 131_072


def lognormal(count: int, median: float, sigma: float) -> list[int]:
    rng = random.Random(0)
    return [min(BUDGET, 1 + int(median * rng.lognormvariate(0.0, sigma))) for _ in range(count)]


MIXES = {
    "1 x 60,000, 3 x 20,000, 40 x 2,000": ([60_000, *[20_000] * 3, *[2_000] * 40], 2),
    "256 lognormal, median 16,000, sigma 0.9": (lognormal(256, 16_000, 0.9), 4),
    "256 lognormal, median 4,000, sigma 1.2": (lognormal(256, 4_000, 1.2), 4),
    "1 x 100,000, 31 x 1,000": ([100_000, *[1_000] * 31], 2),
}


def balance(shards: list[list[list[int]]], costs: list[float]) -> float:
    by_rank = [[sum(costs[i] for i in indices) for indices in micro_batches] for micro_batches in shards]
    return sum(map(max, zip(*by_rank, strict=True))) * len(shards) / sum(map(sum, by_rank))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = []
    print(f"{'model':>14} {'mix':>42} {'ranks':>5} {'rows':>5} {'tokens':>7} {'cost':>6} {'floor':>6} {'ms':>6}")
    for model in ("Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "GLM-5"):
        cost = training_cost(load_facts(model))
        for mix, (lengths, ranks) in MIXES.items():
            costs = [cost(length) for length in lengths]
            ways: dict[str, Callable[[int], float]] = {"tokens": float, "cost": cost}
            found, micro_batches, started = {}, {}, time.monotonic()
            for name, way in ways.items():
                started = time.monotonic()
                shards = pack(lengths, budget=BUDGET, world_size=ranks, cost=way)
                found[name], micro_batches[name] = balance(shards, costs), len(shards[0])
            seconds = time.monotonic() - started
            floor = max(1.0, max(costs) * ranks / sum(costs))
            print(
                f"{model:>14} {mix:>42} {ranks:5} {micro_batches['cost']:5} {found['tokens']:7.3f} "
                f"{found['cost']:6.3f} {floor:6.3f} {1000 * seconds:6.1f}"
            )
            rows.append(
                {
                    "model": model,
                    "mix": mix,
                    "ranks": ranks,
                    "micro_batches": micro_batches,
                    "max_over_mean": {name: round(value, 4) for name, value in found.items()},
                    "floor": round(floor, 4),
                    "pack_by_cost_s": round(seconds, 4),
                }
            )
    record("packing_balance", {"budget": BUDGET, "rows": rows})


if __name__ == "__main__":
    main()
