"""From recipe and cluster profile to a plan: pure functions."""

from hpcrl.jobplan.change import change_recipe
from hpcrl.jobplan.environment import role_variables
from hpcrl.jobplan.plan import (
    absolute_paths,
    absolute_site_paths,
    default_run_name,
    make_plan,
)
from hpcrl.jobplan.preflight import (
    check_engine_flags,
    check_packages,
    check_planned_sizes,
    check_pythons,
    check_secret_files,
    check_secrets,
    check_sizes,
    with_model_of,
)
from hpcrl.jobplan.start_model import check_model

__all__ = [
    "absolute_paths",
    "absolute_site_paths",
    "change_recipe",
    "check_engine_flags",
    "check_model",
    "check_packages",
    "check_planned_sizes",
    "check_pythons",
    "check_secret_files",
    "check_secrets",
    "check_sizes",
    "default_run_name",
    "make_plan",
    "role_variables",
    "with_model_of",
]
