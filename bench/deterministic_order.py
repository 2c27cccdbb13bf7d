"""What ``rollouts.order: deterministic`` costs: the real orchestrator with stub engines whose answers have a long tail.

One run for each order and bound, with the same trainer (a fixed time a step) and the same latencies. Reported is the
time of a step, and how stale batches were. Writes ``bench/results/deterministic_order.json``.

    python bench/deterministic_order.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import ROOT, record

TRAIN_S, MEDIAN_S, TAIL_S, TAIL_SHARE = 0.4, 0.3, 1.5, 0.02
CASES = [("arrival", 1), ("deterministic", 1), ("arrival", 4), ("deterministic", 4), ("arrival", 0)]


async def measure(path: Path, order: str, bound: int, steps: int) -> dict[str, float]:
    """Seconds a step, and mean staleness, after the first steps."""
    from harness import make_run, running  # noqa: PLC0415
    from stub_engine import StubEngine, coin  # noqa: PLC0415

    rollouts = {"max_off_policy_steps": bound, "order": order, "max_in_flight": 128, "ready_batches": 2}
    run = make_run(path, rollouts={**rollouts, "rollouts_per_step": 32})
    engine = StubEngine()

    def latency(number: int) -> float:
        draw = coin("latency", number)
        return TAIL_S if draw.random() < TAIL_SHARE else MEDIAN_S * (0.5 + draw.random())

    engine.request_s = latency
    warm, times, staleness = bound + 2, [], []
    async with running(run, engine) as loop:
        for step in range(1, warm + steps + 1):
            began = time.monotonic()
            batch = await loop.batch(step)
            await asyncio.sleep(TRAIN_S)
            await loop.publish(step)
            if step > warm:
                times.append(time.monotonic() - began)
                staleness.append(batch.stats.staleness_mean)
    return {
        "step_s": round(sum(times) / len(times), 3),
        "median_step_s": round(statistics.median(times), 3),
        "staleness_mean": round(sum(staleness) / len(staleness), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    arguments = parser.parse_args()
    sys.modules.pop("harness", None)
    sys.path[:0] = [str(ROOT / "tests/rollouts"), str(ROOT / "tests")]
    found: dict[str, object] = {"train_s": TRAIN_S, "request_median_s": MEDIAN_S, "request_tail_s": TAIL_S}
    found |= {"tail_share": TAIL_SHARE, "rollouts_per_step": 32, "load_average": round(os.getloadavg()[0], 1)}
    for order, bound in CASES:
        with TemporaryDirectory(prefix="order-") as path:
            found[f"{order}, bound {bound}"] = asyncio.run(measure(Path(path), order, bound, arguments.steps))
        print(json.dumps(found, indent=1), flush=True)
    record("deterministic_order", found)


if __name__ == "__main__":
    main()
