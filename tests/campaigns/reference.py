"""The small reference run with a fault a minute of all kinds, beside the same run without faults.

`recipes/glm5_swe_small.yaml` on a virtual cluster: trainer, prefill and decode engines, router, pool of KV, workers of
environments on nodes of their own, sandboxes and judge. A second environment plays bribes, fork bombs and full disks.
Faults are drawn from all kinds (`fault_trials/reference_faults.py`), a kind not again before all others; each is judged
by its policy as in `random_faults.py`. A fault comes when the run has recovered from the one before, at most once in
``--every`` seconds.

The run must end COMPLETED at its last step, have learned, and leave nothing; ``hpcrl rollouts verify`` must be clean,
and ``hpcrl why`` must name each cause. Counts go to ``bench/results/reference_campaign.json``, and both curves to one
page.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml
from campaign_paths import ROOT
from exercise_tasks import make_exercises
from fault_trials.checks import check_end
from fault_trials.places import SlurmLab, Switches, laboratory, processes
from fault_trials.reference_faults import Deck
from fault_trials.trial import Pace, Trial
from fault_trials.watching import ready_for_fault, status, wait_for
from harness import record, scratch, warmup
from random_faults import counts, median, table
from reference_sizes import FEW, LEARNED, LIMITS, POOL
from rollout_lines import rollouts_of

from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus

RESULT = ROOT / "bench/results/reference_campaign.json"
RECIPE = "glm5_swe_small"
PACE = Pace(limit_s=900.0, steps=1)
SPARE = 2
"""Nodes more than the run has: it goes on without one that went down."""
SIZES = {
    7: FEW,
    28: (),
}
SETTINGS = (
    POOL,
    "environment_workers.count=2",
    "checkpoint.every_steps=2",
    "evaluation.prompts=32",
    "supervision.hang_floor_s=60",
    "supervision.engine.max_restarts=50",
    "job.retry_failures=99",
    # nodes come back: with too many of the few avoided for hours, the run would wait for one
    "job.exclude_failed_nodes_h=0.05",
    "orchestrator.wait_timeout_s=1800",
)


class Arguments(NamedTuple):
    """How much is done."""

    nodes: int = 7
    steps: int = 40
    minutes: float = 60.0
    every_s: float = 60.0
    seed: int = 0


def write_recipe(directory: Path, tasks: Path) -> Path:
    """Write the small reference recipe with its tasks and with an environment whose policies are hostile."""
    small = yaml.safe_load((ROOT / "recipes" / f"{RECIPE}.yaml").read_text())
    (own,) = small["environments"]
    scripted = {"name": "scripted", "kind": "custom", "factory": "scripted_swe:ScriptedSwe", "weight": 0.1}
    scripted |= {"args": {"tasks": str(tasks)}, "turn_timeout_s": 600.0}
    path = directory / "reference_campaign.yaml"
    whole = {"extends": RECIPE, "name": "reference_campaign"}
    path.write_text(yaml.safe_dump(whole | {"environments": [own | {"tasks": str(tasks)}, scripted]}))
    return path


class Campaign:
    """One run with faults, or without."""

    def __init__(self, lab: SlurmLab, switches: Switches, recipe: Path, arguments: Arguments) -> None:
        self.lab, self.switches, self.recipe, self.arguments = lab, switches, recipe, arguments
        self.rng = random.Random(arguments.seed)
        self.deck = Deck(self.rng)
        self.trials: list[dict[str, Any]] = []

    def go(self, name: str, *, faults: bool) -> dict[str, Any]:
        """Return what came of a run of all steps."""
        arguments = self.arguments
        evaluated = f"evaluation.every_steps={max(1, arguments.steps // 4)}"
        sizes = (*SIZES[arguments.nodes], f"trainer.steps={arguments.steps}", f"model.path={self.lab.model}", evaluated)
        began_s = time.monotonic()
        run = self.lab.submit(name, *SETTINGS, *sizes, recipe=str(self.recipe), small=False)
        wait_for(lambda: RunStatus.read(run))
        while faults and time.monotonic() < began_s + 60.0 * arguments.minutes and self._ready(run):
            struck_s = time.monotonic()
            if not self._one_fault(run):
                break
            time.sleep(max(0.0, struck_s + arguments.every_s - time.monotonic()))
        wait_for(lambda: status(run).state.ended, 7200.0)
        return self._end(run, time.monotonic() - began_s)

    def _ready(self, run: RunDir) -> bool:
        """Wait until there can be a fault; False where the run has ended, or its last steps are near."""
        wait_for(lambda: ready_for_fault(run, after=0) or status(run).state.ended, 1800.0)
        return not status(run).state.ended and read_metrics(run)[-1].step < self.arguments.steps - 2

    def _one_fault(self, run: RunDir) -> bool:
        trial = Trial(self.lab, self.switches, run, self.deck.draw(), self.rng, retries=True, pace=PACE)
        print(f"{run.name} step {read_metrics(run)[-1].step}: {trial.fault.name}", flush=True)
        try:
            result = trial.go()
        except (AssertionError, IndexError, StopIteration, psutil.Error, subprocess.SubprocessError) as error:
            result = {"fault": trial.fault.name, "outcome": f"the campaign failed: {error!r}", "as_policy_says": False}
        finally:
            if trial.fault.how == "node":
                self.lab.cluster.revive_node(trial.target.node)
        print(f"    {result}", flush=True)
        self.trials.append(result)
        return result.get("again_s") is not None or status(run).state.ended

    def _end(self, run: RunDir, seconds: float) -> dict[str, Any]:
        """Say how the run ended, and what is wrong with it."""
        state = status(run).state.value
        if not status(run).state.ended:
            self.lab.hpcrl("cancel", run.name, "--yes", check=False)
            state = "not at its last step in time"
        wait_for(lambda: not processes(run), 60.0)
        steps = [each.step for each in read_metrics(run)]
        damaged = {trial["damaged"] for trial in self.trials if "damaged" in trial}
        problems = [problem for problem in check_end(self.lab, run, self.switches.root) if not _of(problem, damaged)]
        bribed = [row for row in rollouts_of(run) if "script" in row["parts"] and row["parts"]["script"] != 0.0]
        problems += [f"script {row['parts']['script']:g} got {row['reward']}" for row in bribed if row["reward"] > 0.0]
        if sorted(set(steps)) != list(range(1, self.arguments.steps + 1)):
            problems.append(f"its steps are {steps}")
        held_out = [
            (event.data["step"], event.data["reward_by_env"]["swe"]) for event in read_events(run, kind="evaluation")
        ]
        if held_out[-1][1] < held_out[0][1] + LEARNED:
            problems.append("it has not learned")
        return {
            "end": state,
            "minutes": round(seconds / 60.0, 1),
            "steps": len(set(steps)),
            "attempts": len(run.attempts()),
            "held_out": held_out,
            "hostile_rollouts": len(bribed),
            "left": len(processes(run)) + len(self.lab.alive_jobs()),
            "problems": problems,
        }


def _of(problem: str, damaged: set[str]) -> bool:
    """Whether a problem is that a version is damaged which was damaged here."""
    return problem.startswith("weights verify:") and any(version in problem for version in damaged)


def summary(campaign: Campaign, ends: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts of the trials, and how the runs ended."""
    trials = campaign.trials
    good = [trial for trial in trials if trial.get("again_s") is not None]
    return {
        "nodes": campaign.arguments.nodes,
        "seed": campaign.arguments.seed,
        **counts(trials),
        "again_s_median": median(trial["again_s"] for trial in good),
        "runs": ends,
        "trials": trials,
    }


def is_good(figures: dict[str, Any]) -> bool:
    """Whether all is as it should be."""
    ends = figures["runs"].values()
    whole = all(end["end"] == "COMPLETED" and not end["problems"] and not end["left"] for end in ends)
    return whole and figures["as_policy_says"] == figures["faults"] and figures["why_right"] == figures["why_asked"]


def main() -> None:
    """Do both runs, print the table, and record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, choices=sorted(SIZES), default=28)
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--minutes", type=float, default=60.0, help="no fault after this time")
    parser.add_argument("--every", type=float, default=60.0, help="least seconds from fault to fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a start model; made where not given")
    parser.add_argument("--router-python", type=Path, default=ROOT / ".venv-vllm/bin/python", help="has vllm-router")
    parser.add_argument("--alone", action="store_true", help="without the run that has no faults")
    parser.add_argument("--page", type=Path, help="where the page with both curves goes")
    parser.add_argument("--result", type=Path, default=RESULT, help="where figures go")
    given = parser.parse_args()
    arguments = Arguments(given.nodes, given.steps, given.minutes, given.every, given.seed)
    root = scratch("reference")
    tasks = make_exercises(root, tasks=512)
    model = given.model or root / "model"
    if given.model is None:
        warmup(RECIPE, model, f"environments.0.tasks={tasks}")
    more = {"limits": LIMITS, "vllm_python": str(given.router_python)}
    with laboratory(root, model, slurm=True, nodes=arguments.nodes + 2 + SPARE, **more) as (lab, switches):
        assert isinstance(lab, SlurmLab)
        lab.env["PYTHONPATH"] = f"{ROOT / 'tests'}:{lab.env['PYTHONPATH']}"
        campaign = Campaign(lab, switches, write_recipe(root, tasks), arguments)
        ends = {"with faults": campaign.go("with-faults", faults=True)}
        if not given.alone:
            ends["without faults"] = campaign.go("without-faults", faults=False)
        if given.page is not None:
            lab.hpcrl("report", *(name.replace(" ", "-") for name in ends), "-o", str(given.page))
    figures = summary(campaign, ends)
    table(campaign.trials)
    record("reference_campaign", figures, given.result)
    print(json.dumps(ends, indent=1))
    if not is_good(figures):
        sys.exit(f"not all as it should be; the runs are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
