"""Do rewards rise as well with a setting as without? The quickstart, on some seeds.

``replay``: router replay, with an engine in bfloat16 and a trainer in float32; engines return their experts in both
runs, so that ``routing_mismatch`` is there to compare. ``fp8``: a trainer in block FP8 (emulated) that publishes FP8,
whose engines compute with these weights in bfloat16, beside one in bfloat16 that publishes bfloat16. Both runs of a
seed begin with one start model. ``mismatch_kl`` is the mean over the steps of the run. Writes
``bench/results/replay_rewards.json`` or ``fp8_rewards.json``.

    python bench/rewards.py {replay,fp8} --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from harness import RunResult, record, run_recipe, scratch, warmup

_BFLOAT16 = ("trainer.dtype=bfloat16", "engine.dtype=bfloat16", "handoff.dtype=bfloat16")
_RETURNED = ("engine.return_routed_experts=true", "engine.dtype=bfloat16")
SUBJECTS = {
    "replay": {
        "without": (*_RETURNED, "trainer.router_replay=false"),
        "with": (*_RETURNED, "trainer.router_replay=true"),
    },
    "fp8": {
        "without": _BFLOAT16,
        "with": (*_BFLOAT16, "trainer.precision.fp8={}", "handoff.kind=fp8"),
    },
}
"""What runs are made of, by what is asked."""


def summary(result: RunResult) -> dict[str, Any]:
    """What is compared of a run."""
    mismatch = [step.routing_mismatch for step in result.steps if step.routing_mismatch is not None]
    found = {
        "heldout_before": round(result.heldout_before, 4),
        "heldout_after": round(result.heldout_after, 4),
        "mismatch_kl": float(f"{statistics.mean(step.mismatch_kl for step in result.steps):.3g}"),
        "run_s": round(result.wall_s, 1),
    }
    if mismatch:
        found["routing_mismatch"] = float(f"{statistics.mean(mismatch):.3g}")
    return found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=tuple(SUBJECTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    directory = scratch(f"{args.subject}-rewards")
    warmup("recipes/quickstart.yaml", model := directory / "model")
    rows = []
    for seed in args.seeds:
        row: dict[str, Any] = {"seed": seed}
        for name, own in SUBJECTS[args.subject].items():
            settings = (f"seed={seed}", f"model.path={model}", f"trainer.steps={args.steps}", *own)
            row[name] = summary(run_recipe("recipes/quickstart.yaml", directory, f"{name}-{seed}", *settings))
            print(seed, name, row[name], flush=True)
        rows.append(row)
    gains = {
        name: round(statistics.mean(row[name]["heldout_after"] - row[name]["heldout_before"] for row in rows), 4)
        for name in ("without", "with")
    }
    record(f"{args.subject}_rewards", {"steps": args.steps, "mean_gain": gains, "seeds": rows})


if __name__ == "__main__":
    main()
