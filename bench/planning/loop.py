"""The planner's estimate of the loop against runs: calibrated from the asynchronous one, it predicts both.

The runs are those of ``bench/async_pays.py`` (one rollout in ten takes ten times longer, synchronous and not); with
``--directory`` an earlier run of that script is read instead of running it again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import async_pays
from harness import record, run_recipe, scratch, warmup

from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.fit_calibration import calibrate, calibration_yaml
from hpcrl.planning.report import make_outlook
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir

_SKIPPED = 4


def run_both(directory: Path, steps: int) -> None:
    """Both runs."""
    warmup("recipes/quickstart.yaml", directory / "model")
    for bound in (0, 4):
        settings = [f"model.path={directory / 'model'}", f"trainer.steps={steps}"]
        settings.append(f"rollouts.max_off_policy_steps={bound}")
        run_recipe("recipes/quickstart.yaml", directory, f"bound-{bound}", *settings, *async_pays.SETTINGS)


def compare(directory: Path) -> dict[str, Any]:
    """Measured and predicted, by bound."""
    file = scratch("planner-loop") / "calibration.yaml"
    file.write_text(calibration_yaml(calibrate(RunDir(directory / "bound-4"), None)), encoding="utf-8")
    calibration = load_calibration(file)
    figures: dict[str, Any] = {}
    for bound in (0, 4):
        own = RunDir(directory / f"bound-{bound}")
        steps = read_metrics(own)[_SKIPPED:]
        loop = make_outlook(own.recipe(), own.cluster(), calibration, "not needed").loop
        assert loop is not None
        measured = {
            "step_s": mean(sum(step.phases_s.values()) for step in steps),
            "trainer_waits": mean(step.phases_s["wait_batch"] / sum(step.phases_s.values()) for step in steps),
            "staleness": mean(step.staleness_mean for step in steps),
        }
        predicted = {"step_s": loop.step_s, "trainer_waits": loop.trainer_waits, "staleness": loop.staleness}
        figures[f"max_off_policy_steps={bound}"] = {"measured": measured, "predicted": predicted}
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what this part takes."""
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--directory", type=Path, help="of an earlier run of async_pays.py")


def run(arguments: argparse.Namespace) -> None:
    """Run, compare, print and record."""
    directory = arguments.directory
    if directory is None:
        directory = scratch("planner-loop-runs")
        run_both(directory, arguments.steps)
    figures = compare(directory)
    for name, pair in figures.items():
        for key, value in pair["measured"].items():
            print(f"{name:<26}{key:<16}measured {value:7.3f}   predicted {pair['predicted'][key]:7.3f}")
    record("planner_loop", figures)
