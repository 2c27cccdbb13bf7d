"""What interpreters of roles have installed, and whether the trainer's layers can be compiled: as far as it is seen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan, Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding

__all__ = ["check_compiler", "has_package"]

_TIMEOUT_S = 120.0
_NO_PACKAGE = 3
_HAS_PACKAGE = f"""
import importlib.util, sys
try:
    found = importlib.util.find_spec(sys.argv[1])
except ModuleNotFoundError:
    found = None
sys.exit(0 if found else {_NO_PACKAGE})
"""
"""Finds it without loading it."""


def check_compiler(recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile) -> list[str]:
    """Check that there is what compiles layers of the trainer, where the recipe asks for that.

    Triton makes kernels for GPUs, a C++ compiler those for processors; the trainer looks again when it starts.

    Returns
    -------
    list of str
        What is missing on GPUs, or why it is not seen from here; empty where it is there or nothing is compiled.

    Raises
    ------
    ConfigError
        A local trainer on processors has no C++ compiler.
    """
    trainers = [group for group in plan.groups if group.role is Role.TRAINER]
    if not recipe.value.trainer.memory.compile or not trainers or recipe.value.job.payload != "roles":
        return []
    key, hint = "trainer.memory.compile", "install it, or set trainer.memory.compile: false"
    if plan.layout.components and plan.layout.components[trainers[0].component].gpus_per_node:
        python = trainers[0].python or plan.python or sys.executable
        found = has_package(plan, python, "triton")
        if found is True:
            return []
        # without it torch may be one for processors, on a site whose GPUs are none
        end = "which compiles layers on GPUs: a trainer that finds any ends when it starts"
        return [f"{python} has no triton, {end} ({key})" if not found else f"whether the trainer has triton {found}"]
    if plan.container is not None or isinstance(site, SlurmCluster):
        where = "in the container" if plan.container is not None else "on its nodes"
        return [f"whether the trainer has a C++ compiler {where} was not checked: that is not seen from here"]
    # as torch looks for it
    names = [name for name in (os.environ.get("CXX"), "g++") if name]
    if not any(map(shutil.which, names)):
        what = f"layers are compiled by a C++ compiler, and there is none ({', '.join(names)})"
        raise ConfigError([Finding(recipe.where(key), key, what, hint)])
    return []


def has_package(plan: Plan, python: str, package: str) -> bool | str:
    """Whether an interpreter can import a package; where that is not seen, why, as the end of a sentence."""
    if plan.container is not None or not Path(python).is_file():
        where = "in the container" if plan.container is not None else f"visible here ({python})"
        return f"was not checked: its environment is not {where}"
    try:
        result = subprocess.run(
            [python, "-P", "-c", _HAS_PACKAGE, package], capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"could not be seen: {error}"
    if result.returncode not in (0, _NO_PACKAGE):
        return f"could not be seen: {python} ended with an error"
    return result.returncode == 0
