"""Inputs of forecasts from the options of a command: recipe, cluster profile and calibration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpcrl.cli.output import say

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.planning.calibration.calibration_file import Calibration
    from hpcrl.submit.prepare import PreparedRun


def read_calibration(path: str | None, cluster: ClusterProfile, tables: list[str] | None = None) -> Calibration:
    """Read the calibration file, with the kernel times of the site and those that were named."""
    from hpcrl.planning.calibration.calibration_file import load_site_calibration

    return load_site_calibration(cluster, path, tables or ())


def prepare_forecast(recipe: str, cluster: str, overrides: list[str] | None) -> PreparedRun:
    """Prepare a run that is computed about: all rules must hold but those about what this version can start."""
    from pathlib import Path

    from hpcrl.planning.report import find_facts
    from hpcrl.submit.prepare import prepare

    prepared = prepare(recipe, cluster, overrides or (), environ=os.environ, cwd=Path.cwd(), programs=False)
    prepared.refuse_forecast()
    find_facts(prepared.recipe.value)
    return prepared


def say_refusals(prepared: PreparedRun) -> None:
    """Say on the standard error why `hpcrl submit` would refuse what is computed about here, in one line.

    Rules, model and secrets are checked; `hpcrl plan` and `hpcrl recipe check` try what roles execute, too.
    """
    if not prepared.problems:
        return
    first, others = prepared.problems[0], len(prepared.problems) - 1
    more = f" (and {others} more: hpcrl recipe check)" if others else ""
    say(f"note: hpcrl submit would refuse {prepared.recipe.source}: {first.key}: {first.what}{more}", err=True)
