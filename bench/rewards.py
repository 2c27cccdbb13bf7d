"""Do rewards rise as well with a setting as without? The quickstart, on some seeds.

``replay``: router replay, with an engine in bfloat16 and a trainer in float32; engines return their experts in both
runs, so that ``routing_mismatch`` is there to compare. ``replay_vllm``: the same with a real vLLM engine behind
vllm-router (`recipes/quickstart_vllm.yaml`; ``python3 tools/bootstrap.py --vllm``). ``fp8``: a trainer in block FP8
(emulated) that publishes FP8, whose engines compute with these weights in bfloat16, beside one in bfloat16 that
publishes bfloat16. Both runs of a seed begin with one start model. ``mismatch_kl`` is the mean over the steps of the
run. ``difference`` is how much more was gained with the setting, seed by seed, with its 95% interval (paired, Student's
t). Writes ``bench/results/<subject>_rewards.json``; with ``--add`` seeds that are in there stay.

    python bench/rewards.py {replay,replay_vllm,fp8} --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from harness import ROOT, RunResult, record, run_recipe, scratch, warmup

_BFLOAT16 = ("trainer.dtype=bfloat16", "engine.dtype=bfloat16", "handoff.dtype=bfloat16")
_RETURNED = ("engine.return_routed_experts=true", "engine.dtype=bfloat16")
_REPLAY = {
    "without": (*_RETURNED, "trainer.router_replay=false"),
    "with": (*_RETURNED, "trainer.router_replay=true"),
}
_ONE_VLLM = ("engine.replicas=1", "engine.kv_store=null")
SUBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "replay": _REPLAY,
    "replay_vllm": {name: (*_ONE_VLLM, *settings) for name, settings in _REPLAY.items()},
    "fp8": {
        "without": _BFLOAT16,
        "with": (*_BFLOAT16, "trainer.precision.fp8={}", "handoff.kind=fp8"),
    },
}
"""What runs are made of, by what is asked."""
RECIPES = {"replay_vllm": "recipes/quickstart_vllm.yaml"}
"""Of subjects that have one of their own; the others: the quickstart."""
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Quantiles 0.975 of Student's t with 1, 2, … degrees of freedom."""


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
    if replayed := [step.replayed_share for step in result.steps if step.replayed_share is not None]:
        found["replayed_share"] = round(statistics.mean(replayed), 4)
    return found


def difference(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of the differences of the two runs of a seed, and half the width of its 95% interval."""
    found = [row["with"]["heldout_after"] - row["without"]["heldout_after"] for row in rows]
    half = STUDENT[len(found) - 2] * statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("inf")
    return {"mean": round(statistics.mean(found), 4), "half_interval_95": round(half, 4)}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=tuple(SUBJECTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--model", type=Path, help="the start model; by default one is warmed up")
    parser.add_argument("--add", action="store_true", help="keep other seeds of the results, of as many steps")
    args = parser.parse_args()
    directory = scratch(f"{args.subject}-rewards")
    recipe = RECIPES.get(args.subject, "recipes/quickstart.yaml")
    if (model := args.model) is None:
        warmup(recipe, model := directory / "model")
    results = ROOT / f"bench/results/{args.subject}_rewards.json"
    before = json.loads(results.read_text()) if args.add else {"steps": args.steps, "seeds": []}
    if before["steps"] != args.steps:
        parser.error(f"the seeds in {results.name} had {before['steps']} steps")
    rows = [row for row in before["seeds"] if row["seed"] not in args.seeds]
    for seed in args.seeds:
        row: dict[str, Any] = {"seed": seed}
        for name, own in SUBJECTS[args.subject].items():
            settings = (f"seed={seed}", f"model.path={model}", f"trainer.steps={args.steps}", *own)
            row[name] = summary(run_recipe(recipe, directory, f"{name}-{seed}", *settings))
            print(seed, name, row[name], flush=True)
        rows.append(row)
    gains = {
        name: round(statistics.mean(row[name]["heldout_after"] - row[name]["heldout_before"] for row in rows), 4)
        for name in ("without", "with")
    }
    figures = {"steps": args.steps, "mean_gain": gains, "difference": difference(rows)}
    record(f"{args.subject}_rewards", {**figures, "seeds": sorted(rows, key=lambda row: row["seed"])})


if __name__ == "__main__":
    main()
