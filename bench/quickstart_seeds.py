"""Does the quickstart learn, on any seed? Warm-up and run on three seeds; held-out reward before and after."""

from __future__ import annotations

import argparse

from harness import record, run_recipe, scratch, warmup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    directory = scratch("seeds")
    rows = []
    print(f"{'seed':>4} {'before':>7} {'after':>7} {'gain':>6} {'ratio':>6} {'warm-up s':>9} {'run s':>6}")
    for seed in seeds:
        model = directory / f"model-{seed}"
        warmup_s = warmup("recipes/quickstart.yaml", model, f"seed={seed}")
        result = run_recipe("recipes/quickstart.yaml", directory, f"seed-{seed}", f"seed={seed}", f"model.path={model}")
        before, after = result.heldout_before, result.heldout_after
        row = {
            "seed": seed,
            "heldout_before": before,
            "heldout_after": after,
            "by_env_before": result.evaluations[0]["by_env"],
            "by_env_after": result.evaluations[-1]["by_env"],
            "warmup_s": round(warmup_s, 1),
            "run_s": round(result.wall_s, 1),
            "steps": len(result.steps),
        }
        rows.append(row)
        print(
            f"{seed:>4} {before:>7.3f} {after:>7.3f} {after - before:>6.3f} {after / before:>6.2f} "
            f"{warmup_s:>9.1f} {result.wall_s:>6.1f}",
            flush=True,
        )
    good = all(
        r["heldout_after"] - r["heldout_before"] >= 0.2 and r["heldout_after"] >= 2 * r["heldout_before"] for r in rows
    )
    print("goal (up by 0.2 and twice the start on every seed):", "reached" if good else "NOT reached")
    record("quickstart_seeds", {"goal_reached": good, "seeds": rows})


if __name__ == "__main__":
    main()
