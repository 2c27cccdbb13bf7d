"""What asynchrony is worth with a long tail: 10 % of rollouts take 10 times longer.

The same recipe, synchronous (``max_off_policy_steps: 0``) and with a staleness of up to 4, one after the other
in one run of this script: steps per minute and the share of its time that the trainer waits for rollouts.
"""

from __future__ import annotations

import argparse
from statistics import mean

from harness import RunResult, record, run_recipe, scratch, warmup

SETTINGS = (
    "environments.0.latency={median_s: 0.3, tail_share: 0.1, tail_factor: 10}",
    "environments.1.latency={median_s: 0.3, tail_share: 0.1, tail_factor: 10}",
    "rollouts.rollouts_per_step=32",
    "rollouts.max_in_flight=160",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=0",
)


def measure(result: RunResult, skip: int) -> dict[str, float]:
    """Figures of the steps after the first ``skip`` (start-up)."""
    steps = result.steps[skip:]
    seconds = steps[-1].time_s - result.steps[skip - 1].time_s
    waiting = sum(step.phases_s["wait_batch"] for step in steps)
    return {
        "steps_per_minute": 60 * len(steps) / seconds,
        "waiting_share": waiting / seconds,
        "staleness_mean": mean(step.staleness_mean for step in steps),
        "staleness_max": max(step.staleness_max for step in steps),
        "reward_last_quarter": mean(step.reward_mean for step in steps[-len(steps) // 4 :]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skip", type=int, default=4, help="first steps that are not measured")
    arguments = parser.parse_args()
    directory = scratch("async")
    model = directory / "model"
    warmup("recipes/quickstart.yaml", model)
    figures = {}
    for bound in (0, 4):
        result = run_recipe(
            "recipes/quickstart.yaml",
            directory,
            f"bound-{bound}",
            f"model.path={model}",
            f"trainer.steps={arguments.steps}",
            f"rollouts.max_off_policy_steps={bound}",
            *SETTINGS,
        )
        figures[bound] = measure(result, arguments.skip)
    ratio = figures[4]["steps_per_minute"] / figures[0]["steps_per_minute"]
    print(f"{'max_off_policy_steps':<24}{0:>10}{4:>10}")
    for name in figures[0]:
        print(f"{name:<24}{figures[0][name]:>10.3f}{figures[4][name]:>10.3f}")
    print(f"asynchronous / synchronous steps per minute: {ratio:.2f}")
    record("async_pays", {"synchronous": figures[0], "asynchronous": figures[4], "ratio": ratio, "settings": SETTINGS})


if __name__ == "__main__":
    main()
