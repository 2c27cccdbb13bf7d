"""Published figures beside what the planner's formulas give for the same hardware, and the reason where it is wrong.

No formula or constant is fitted to the figures of the reference run (GLM-5 on 28 nodes of 8 H200) or to whole steps of
others. A few constants of the calibration file come from one published figure each: these cases are marked `fitted`,
the others are predictions. What no plan can express is refused, or said beside the prediction of the plan's own layout.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from harness import record

from planning.published.cases import Case, shares, table, with_ranges
from planning.published.reference import reference_run, reference_terms, sensitivity, sizes
from planning.published.rl import RUNS, estimate, rl_steps
from planning.published.serving import serving
from planning.published.stages import stages
from planning.published.training import training
from planning.published.weights import weight_updates


def all_cases() -> list[Case]:
    """In the order of the table."""
    return [*reference_run(), *rl_steps(), *training(), *stages(), *serving(), *weight_updates(), *sizes()]


def add_arguments(_: argparse.ArgumentParser) -> None:
    """Take nothing."""


def run(_: argparse.Namespace) -> None:
    """Predict, print and record."""
    cases = with_ranges(all_cases)
    print(table(cases))
    print()
    found = shares(cases)
    for subject, share in found.items():
        within = "  ".join(f"{name} {value:4.0%}" for name, value in share.items() if name != "cases")
        print(f"{subject:<10} {share['cases']:3.0f} predictions  {within}")
    fitted = sum(case.fitted for case in cases)
    refused = sum(case.predicted is None for case in cases)
    print(f"{fitted} more are fitted, {refused} are refused: no plan can express them")
    print()
    changes = sensitivity()
    for name, (trainer, rollouts, step) in changes.items():
        print(f"{name:<24} trainer {trainer:5.2f}  rollouts {rollouts:5.2f}  step {step:5.2f} min")
    spreads = {row.model: {str(s): estimate(row, s).step_s for s in (0.3, 0.5, 0.8)} for row in RUNS}
    for model, steps in spreads.items():
        print(f"{model:<18} step by spread of lengths: {', '.join(f'{s}: {v:.0f} s' for s, v in steps.items())}")
    record(
        "planner_published",
        {
            "cases": [{**asdict(case), "error": case.error, "in_range": case.in_range} for case in cases],
            "shares": found,
            "fitted": fitted,
            "refused": refused,
            "reference_run_minutes_trainer_rollouts_step": changes,
            "reference_run_trainer_terms_s": reference_terms(),
            "steps_by_spread_of_lengths_s": spreads,
        },
    )
