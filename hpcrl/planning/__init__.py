"""From recipe and cluster profile to a plan: pure functions."""

from hpcrl.planning.environment import role_variables
from hpcrl.planning.plan import (
    absolute_paths,
    absolute_site_paths,
    default_run_name,
    make_plan,
    resolve_runs_root,
)
from hpcrl.planning.preflight import check_model

__all__ = [
    "absolute_paths",
    "absolute_site_paths",
    "check_model",
    "default_run_name",
    "make_plan",
    "resolve_runs_root",
    "role_variables",
]
