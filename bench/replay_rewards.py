"""Do rewards rise as well with router replay as without? The quickstart with an engine in bfloat16, on some seeds.

Both runs of a seed begin with one start model, and the trainer computes in float32; engines return their experts in
both, so that ``routing_mismatch`` is there to compare. ``mismatch_kl`` is the mean over the steps of the run. Writes
``bench/results/replay_rewards.json``.

    python bench/replay_rewards.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from harness import RunResult, record, run_recipe, scratch, warmup


def summary(result: RunResult) -> dict[str, Any]:
    """What is compared of a run."""
    mismatch = [step.routing_mismatch for step in result.steps if step.routing_mismatch is not None]
    return {
        "heldout_before": round(result.heldout_before, 4),
        "heldout_after": round(result.heldout_after, 4),
        "mismatch_kl": float(f"{statistics.mean(step.mismatch_kl for step in result.steps):.3g}"),
        "routing_mismatch": float(f"{statistics.mean(mismatch):.3g}"),
        "run_s": round(result.wall_s, 1),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    directory = scratch("replay-rewards")
    warmup("recipes/quickstart.yaml", model := directory / "model")
    rows = []
    for seed in args.seeds:
        row: dict[str, Any] = {"seed": seed}
        for name, replay in (("without", "false"), ("with", "true")):
            settings = (
                f"seed={seed}",
                f"model.path={model}",
                f"trainer.steps={args.steps}",
                f"trainer.router_replay={replay}",
                "engine.return_routed_experts=true",
                "engine.dtype=bfloat16",
            )
            row[name] = summary(run_recipe("recipes/quickstart.yaml", directory, f"{name}-{seed}", *settings))
            print(seed, name, row[name], flush=True)
        rows.append(row)
    gains = {
        name: round(statistics.mean(row[name]["heldout_after"] - row[name]["heldout_before"] for row in rows), 4)
        for name in ("without", "with")
    }
    record("replay_rewards", {"steps": args.steps, "mean_gain": gains, "seeds": rows})


if __name__ == "__main__":
    main()
