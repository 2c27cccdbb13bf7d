"""Is the simulator right? The quickstart, asynchronous and synchronous, with and without a long tail.

Runs the four settings, measures durations (service times, see docs/simulation.md) in the two settings without a tail
of the first repeat, simulates all four, and compares steps per minute, the trainer's waiting share, staleness, and the
share of the time in which the engine is frozen by updates. What the simulator is given of the settings with a tail is
the recipe only, with the distribution of waits that it injects. What it is never given: rates, waits, staleness.

The policy learns next to nothing (a learning rate of 1e-12), so that all settings have the same rollouts.
Measured values are medians over repeats; their spread is recorded, and so is the share of the CPUs that other processes
took during a run: all roles share the CPUs of one machine, and so does whatever else runs there. What was measured is
written to ``bench/results/NAME-measured.json`` and ``NAME-durations.yaml``; ``--again`` predicts from these alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness import ROOT, OtherLoad, record, run_recipe, scratch, warmup

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.recipe import Recipe
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.simulation import Durations, load_durations, make_scenario, save_durations, simulate
from hpcrl.simulation.inputs.measure import measure
from planning.case_files import read_cases

RECIPE = str(ROOT / "recipes/quickstart.yaml")
RESULTS = ROOT / "bench/results"
SKIPPED = 6
SEEDS = 5
SETTINGS: dict[str, dict[str, float]] = read_cases("simulator")["runs"]
MEASURED_IN = ("async", "sync")
COUNTED = ("steps_per_minute", "trainer_waiting_share", "staleness_mean")
TRACE = 200
"""Recorded rollouts of an environment that are kept."""


def settings(name: str, model: Path, median_s: float, in_flight: int) -> list[str]:
    """Overrides of one setting."""
    own = SETTINGS[name]
    latency = f"latency={{median_s: {median_s}, tail_share: {own['tail_share']}, tail_factor: 10}}"
    return [
        f"model.path={model}",
        f"trainer.steps={own['steps']}",
        f"rollouts.max_off_policy_steps={own['max_off_policy_steps']}",
        *(f"environments.{i}.{latency}" for i in (0, 1)),
        "rollouts.rollouts_per_step=32",
        f"rollouts.max_in_flight={in_flight}",
        "trainer.optimizer.learning_rate=1e-12",
        "evaluation.every_steps=0",
        "checkpoint.every_steps=0",
    ]


def figures(steps: Sequence[Any], phases: Sequence[dict[str, float]], span_s: float) -> dict[str, float]:
    """What is compared, of the steps that take ``span_s`` together."""
    return {
        "steps_per_minute": 60 * len(steps) / span_s,
        "trainer_waiting_share": sum(phase["wait_batch"] for phase in phases) / span_s,
        "staleness_mean": mean(step.staleness_mean for step in steps),
        "staleness_max": float(max(step.staleness_max for step in steps)),
    }


def of_run(run: RunDir) -> dict[str, float]:
    """Figures of a real run."""
    records: list[StepRecord] = read_metrics(run)
    steps = records[SKIPPED:]
    begin_s, end_s = records[SKIPPED - 1].time_s, steps[-1].time_s
    events = [e for e in read_events(run, kind="engine.weights_updated") if begin_s < e.time_s <= end_s]
    found = figures(steps, [step.phases_s for step in steps], end_s - begin_s)
    return {**found, "engine_frozen_share": sum(e.data["pause_s"] for e in events) / (end_s - begin_s)}


def of_simulation(recipe: Recipe, durations: Durations) -> dict[str, float]:
    """Figures of a simulation of the same recipe: means over seeds."""
    cluster = load_cluster("local").value
    all_found = []
    for seed in range(SEEDS):
        result = simulate(make_scenario(recipe, cluster, durations, seed=seed, sample=1))
        steps = result.step_series[SKIPPED:]
        span_s = steps[-1].end_s - result.step_series[SKIPPED - 1].end_s
        found = figures(steps, [step.phases_s for step in steps], span_s)
        all_found.append({**found, "engine_frozen_share": result.engine.frozen})
    return {name: mean(found[name] for found in all_found) for name in all_found[0]}


def shortened(durations: Durations) -> Durations:
    """With a part of the recorded rollouts, evenly chosen: a file that can be kept."""
    environments = {
        name: environment.model_copy(update={"trace": environment.trace[:: -(-len(environment.trace) // TRACE)]})
        for name, environment in durations.environments.items()
    }
    return durations.model_copy(update={"environments": environments})


def do_runs(directory: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Run what is not there yet; the share of the CPUs that others took, by run (kept beside the runs)."""
    directory.mkdir(exist_ok=True)
    kept = directory / "others.json"
    others: dict[str, float] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    model = directory / "model"
    if not model.exists():
        warmup(RECIPE, model)
    for name in (f"{name}-{repeat}" for repeat in range(arguments.repeats) for name in SETTINGS):
        if (directory / name).exists():
            continue
        overrides = settings(name.rpartition("-")[0], model, arguments.median_s, arguments.in_flight)
        with OtherLoad(str(directory)) as load:
            run_recipe(RECIPE, directory, name, *overrides)
        others[name] = load.share
        kept.write_text(json.dumps(others), encoding="utf-8")
        print(f"{name}: other processes took {load.share:.0%} of the CPUs", flush=True)
    return others


def measured(directory: Path, arguments: argparse.Namespace) -> tuple[dict[str, Any], Durations]:
    """What all runs did, and the durations of those that are measured; both are kept."""
    others = do_runs(directory, arguments)
    durations = shortened(measure(*(RunDir(directory / f"{name}-0") for name in MEASURED_IN)))
    found: dict[str, Any] = {
        "settings": {"median_s": arguments.median_s, "in_flight": arguments.in_flight, "tail_factor": 10},
        "repeats": arguments.repeats,
        "durations_measured_in": MEASURED_IN,
        "others_cpu_share": others,
        "runs": {
            name: [of_run(RunDir(directory / f"{name}-{repeat}")) for repeat in range(arguments.repeats)]
            for name in SETTINGS
        },
    }
    save_durations(durations, RESULTS / f"{arguments.name}-durations.yaml")
    record(f"{arguments.name}-measured", found)
    return found, durations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what this part takes."""
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--median-s", type=float, default=0.5, help="injected latency of an ordinary rollout")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--runs", type=Path, help="directory of runs: those that are there are not run again")
    parser.add_argument("--name", default="simulator_quickstart", help="of the result files")
    parser.add_argument("--only-run", action="store_true", help="run, and leave the comparison for later")
    parser.add_argument("--again", action="store_true", help="predict again what was measured earlier; runs nothing")


def run(arguments: argparse.Namespace) -> None:
    """Run or read, compare, print and record."""
    directory = arguments.runs or scratch("simulator")
    if arguments.only_run:
        do_runs(directory, arguments)
        return
    if arguments.again:
        found = json.loads((RESULTS / f"{arguments.name}-measured.json").read_text(encoding="utf-8"))
        durations = load_durations(RESULTS / f"{arguments.name}-durations.yaml")
    else:
        found, durations = measured(directory, arguments)
    table, within = compare(found, durations)
    print(f"{within} figures (rate, waiting share, mean staleness) within 10 %")
    fed = durations.model_dump(mode="json", include={"engine", "sharing", "source"})
    kept = {name: value for name, value in found.items() if name not in ("date", "machine", "runs")}
    record(arguments.name, {**kept, "fed": fed, "within_10_percent": within, "figures": table})


def compare(found: dict[str, Any], durations: Durations) -> tuple[dict[str, Any], str]:
    """Measured and predicted by setting and figure; how many of those that count are within 10 %."""
    table: dict[str, Any] = {}
    within = []
    print(f"{'setting':<12}{'figure':<24}{'measured':>10}{'lowest':>9}{'highest':>9}{'predicted':>11}{'error':>8}")
    for name, runs in found["runs"].items():
        used = found["settings"]
        # the model's path is of no account here
        recipe = load_recipe(RECIPE, settings(name, Path("model"), used["median_s"], used["in_flight"])).value
        predicted = of_simulation(recipe, durations)
        table[name] = {}
        for figure, value in predicted.items():
            seen = [run[figure] for run in runs]
            real = median(seen)
            error = value / real - 1 if real else value - real
            row = {"measured": real, "lowest": min(seen), "highest": max(seen), "predicted": value, "error": error}
            table[name][figure] = row
            if figure in COUNTED:
                within.append(abs(error) <= 0.1)
            print(f"{name:<12}{figure:<24}{real:>10.3f}{min(seen):>9.3f}{max(seen):>9.3f}{value:>11.3f}{error:>+8.1%}")
    return table, f"{sum(within)} of {len(within)}"
