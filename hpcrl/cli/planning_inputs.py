"""What forecasts rest on, from the options of a command: recipe, cluster profile and calibration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpcrl.cli.output import say

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.load import Loaded
    from hpcrl.config.recipe import Recipe
    from hpcrl.planning.calibration.file import Calibration

__all__ = ["load_for_planning", "read_calibration", "say_refusals"]


def read_calibration(path: str | None, cluster: ClusterProfile, tables: list[str] | None = None) -> Calibration:
    """Read the calibration file, with the kernel times of the site and those that were named."""
    from pathlib import Path

    from hpcrl.config.cluster import SlurmCluster
    from hpcrl.planning.calibration.file import load_calibration

    own = cluster.paths.tables if isinstance(cluster, SlurmCluster) else ()
    files = [Path(os.path.expandvars(name)).expanduser() for name in (*own, *(tables or ()))]
    return load_calibration(None if path is None else Path(path), files)


def load_for_planning(
    recipe: str, cluster: str, overrides: list[str] | None
) -> tuple[Loaded[Recipe], Loaded[ClusterProfile]]:
    """Load both and check all rules but those about what this version can start."""

    from hpcrl.config.joined import load_both
    from hpcrl.config.rules.table import check_rules
    from hpcrl.jobplan.model_rules import check_model_rules
    from hpcrl.planning.report import find_facts

    loaded, site = load_both(recipe, cluster, overrides or (), environ=os.environ)
    check_rules(loaded, site, planning=True)
    facts = find_facts(loaded.value)
    if not isinstance(facts, str):
        check_model_rules(loaded, site, facts)
    return loaded, site


def say_refusals(loaded: Loaded[Recipe], site: Loaded[ClusterProfile]) -> None:
    """Say on the standard error why `hpcrl submit` would refuse what is computed about here, in one line.

    Rules, model and secrets are looked at; `hpcrl plan` and `hpcrl recipe check` try what roles execute, too.
    """
    from pathlib import Path

    from hpcrl.submit.prepare import RunPlace, examine

    prepared = examine(loaded, site, RunPlace(cwd=Path.cwd()), programs=False)
    if not prepared.problems:
        return
    first, others = prepared.problems[0], len(prepared.problems) - 1
    more = f" (and {others} more: hpcrl recipe check)" if others else ""
    say(f"note: hpcrl submit would refuse {loaded.source}: {first.key}: {first.what}{more}", err=True)
