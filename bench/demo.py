"""Does a published model learn? The recipe of ``make demo`` on some seeds: held-out reward, its curve, and rollouts.

Seeds differ in the order of questions and in the noise of sampling; the start model is the same.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

from harness import ROOT, OtherLoad, RunResult, record, run_recipe, scratch

from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="smollm2", help="smollm2 or smollm2_lora")
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2", help="what tools/smollm2.py made")
    parser.add_argument("--picture", type=Path, help="where the picture of the first seed goes")
    parser.add_argument("--append", action="store_true", help="keep what is recorded of other seeds")
    parser.add_argument("--run", type=Path, help="measure this finished run in place of new ones")
    arguments = parser.parse_args()
    recorded = ROOT / f"bench/results/{arguments.recipe}.json"
    rows = json.loads(recorded.read_text(encoding="utf-8"))["seeds"] if arguments.append else []
    if arguments.run:
        result = finished(RunDir(arguments.run))
        rows = [*rows, {"seed": result.run.recipe().seed, **measured(result)}]
        record(arguments.recipe, {"seeds": rows})
        return
    directory = scratch("demo")
    for seed in arguments.seeds:
        settings = (f"seed={seed}", f"model.path={arguments.model.absolute()}")
        with OtherLoad(str(directory)) as others:
            result = run_recipe(f"recipes/{arguments.recipe}.yaml", directory, f"seed-{seed}", *settings)
        rows = [row for row in rows if row["seed"] != seed]
        rows.append({"seed": seed, **measured(result), "load_of_others": round(others.share, 2)})
        print(f"seed {seed}: {result.heldout_before:.3f} -> {result.heldout_after:.3f} in {result.wall_s / 60:.1f} min")
        if arguments.picture and seed == arguments.seeds[0]:
            shutil.copyfile(result.run.path / "report.png", arguments.picture)
        record(arguments.recipe, {"seeds": rows})


def finished(run: RunDir) -> RunResult:
    """A run that was made before, perhaps in several attempts; its time is that of its steps."""
    steps = read_metrics(run)
    evaluations = [event.data for event in read_events(run) if event.kind == "evaluation"]
    return RunResult(run, sum(sum(step.phases_s.values()) for step in steps), steps, evaluations)


def measured(result: RunResult) -> dict[str, Any]:
    """The figures of one run, and some of its rollouts, from the beginning and from the end."""
    steps, evaluations = result.steps, result.evaluations
    prompts = evaluations[0]["prompts"]
    return {
        "heldout_before": round(result.heldout_before, 4),
        "heldout_after": round(result.heldout_after, 4),
        "standard_error": round(standard_error(result.heldout_before, result.heldout_after, prompts), 4),
        "heldout": [[each["version"], round(each["reward"], 4)] for each in evaluations],
        "heldout_prompts": prompts,
        "reward": [round(step.reward_mean, 4) for step in steps],
        "sampled_tokens_a_rollout": [round(step.sampled_tokens / step.reward_count, 1) for step in steps],
        "mismatch_kl": round(statistics.fmean(step.mismatch_kl for step in steps), 6),
        "step_s": round(statistics.median(sum(step.phases_s.values()) for step in steps), 1),
        "tokens_per_s": round(statistics.median(step.tokens_per_s for step in steps), 1),
        "run_s": round(result.wall_s),
        "rollouts": rollouts_of(result),
    }


def standard_error(before: float, after: float, prompts: int) -> float:
    """Of the difference of two shares of right answers, as if the questions were others each time.

    They are the same ones, so this is more than the true one.
    """
    return math.sqrt((before * (1 - before) + after * (1 - after)) / prompts)


def rollouts_of(result: RunResult) -> list[dict[str, Any]]:
    """Rollouts of the first and of the last step, each of another prompt."""
    chosen: list[dict[str, Any]] = []
    for step in (result.steps[0].step, result.steps[-1].step):
        by_group: dict[int, dict[str, Any]] = {}
        for line in step_lines(result, step):
            by_group.setdefault(line["group"], line)
        kept = ("prompt_index", "reward", "staleness", "text")
        chosen += [{"step": step, **{key: line[key] for key in kept}} for line in list(by_group.values())[:5]]
    return chosen


def step_lines(result: RunResult, step: int) -> list[dict[str, Any]]:
    """What the trainer consumed in a step."""
    path = result.run.path / "rollouts" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
