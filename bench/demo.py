"""Does a published model learn? The recipe of ``make demo`` on some seeds: held-out reward, its curve, and rollouts.

Seeds differ in the order of questions and in the noise of sampling; the start model is the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from harness import ROOT, OtherLoad, RunResult, record, run_recipe, scratch

MARK = "HPCRL_RUN_ID"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="smollm2", help="smollm2 or smollm2_lora")
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2", help="what tools/smollm2.py made")
    parser.add_argument("--picture", type=Path, help="where the picture of the first seed goes")
    arguments = parser.parse_args()
    directory, rows = scratch("demo"), []
    for seed in arguments.seeds:
        settings = (f"seed={seed}", f"model.path={arguments.model.absolute()}")
        with OtherLoad(MARK) as others:
            result = run_recipe(f"recipes/{arguments.recipe}.yaml", directory, f"seed-{seed}", *settings)
        rows.append({"seed": seed, **measured(result), "load_of_others": round(others.share, 2)})
        print(f"seed {seed}: {result.heldout_before:.3f} -> {result.heldout_after:.3f} in {result.wall_s / 60:.1f} min")
        if arguments.picture and seed == arguments.seeds[0]:
            shutil.copyfile(result.run.path / "report.png", arguments.picture)
        record(arguments.recipe, {"seeds": rows})


def measured(result: RunResult) -> dict[str, Any]:
    """The figures of one run."""
    steps = result.steps
    return {
        "heldout_before": result.heldout_before,
        "heldout_after": result.heldout_after,
        "heldout": [[each["step"], round(each["reward"], 4)] for each in result.evaluations],
        "reward": [round(step.reward, 4) for step in steps],
        "tokens_per_rollout": {},
        "step_s": round(statistics.median(step.step_s for step in steps), 1),
        "run_s": round(result.wall_s),
        "rollouts": rollouts_of(result),
    }


def rollouts_of(result: RunResult) -> list[dict[str, Any]]:
    """Some rollouts of the first and of the last step."""
    files = sorted((result.run.path / "rollouts").glob("step*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return rows[:3] + rows[-3:]


if __name__ == "__main__":
    main()
