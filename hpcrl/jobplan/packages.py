"""Check the packages of roles' interpreters, and the compilers of the trainer's layers, as far as they are visible."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan, Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding, UsageError
from hpcrl.installing import ROLE_IMPORTS, install_command

_ROLES = {
    Role.TRAINER: ("trainer", ROLE_IMPORTS["trainer"]),
    Role.ORCHESTRATOR: ("rollouts", ROLE_IMPORTS["orchestrator"]),
    Role.ENV: ("rollouts", ROLE_IMPORTS["env"]),
    **dict.fromkeys((Role.ENGINE, Role.PREFILL, Role.DECODE), ("engine", ROLE_IMPORTS["engine"])),
}
"""The extra of hpcrl that a role is started from, and what it imports of it."""

_TIMEOUT_S = 120.0
_SOME_LACK = 3
_LACKING = f"""
import importlib.util, sys
lacking = []
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if not found:
        lacking.append(name)
print("lacks", *lacking)
sys.exit({_SOME_LACK} if lacking else 0)
"""
"""Finds packages without loading them: a namespace that some other package left behind counts as found."""


def check_compiler(recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile) -> list[str]:
    """Check that there is what compiles layers of the trainer, where the recipe asks for that.

    Triton makes kernels for GPUs, a C++ compiler those for processors; the trainer looks again when it starts.

    Returns
    -------
    list of str
        What is missing on GPUs, or why it is not visible here; empty where it is there or nothing is compiled.

    Raises
    ------
    ConfigError
        A local trainer on processors has no C++ compiler.
    """
    trainers = [group for group in plan.groups if group.role is Role.TRAINER]
    if not recipe.value.trainer.memory.compile or not trainers or recipe.value.job.payload == "probe":
        return []
    key, hint = "trainer.memory.compile", "install it, or set trainer.memory.compile: false"
    if plan.layout.components and plan.layout.components[trainers[0].component].gpus_per_node:
        python = trainers[0].python or plan.python or sys.executable
        found = has_package(plan, python, "triton")
        if found is True:
            return []
        # only a note: torch without triton may be a build for CPUs, for a site without GPUs
        end = "which compiles layers on GPUs: a trainer with GPUs would fail at its start"
        return [f"{python} has no triton, {end} ({key})" if not found else f"whether the trainer has triton {found}"]
    if plan.container is not None or site.uses_slurm:
        where = "in the container" if plan.container is not None else "on its nodes"
        return [f"whether the trainer has a C++ compiler {where} was not checked: that is not visible here"]
    # the same lookup as torch's
    names = [name for name in (os.environ.get("CXX"), "g++") if name]
    if not any(map(shutil.which, names)):
        what = f"layers are compiled by a C++ compiler, and there is none ({', '.join(names)})"
        raise ConfigError([Finding(recipe.where(key), key, what, hint)])
    return []


def role_packages(role: Role, backend: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the extra of hpcrl that a role needs and the packages that it imports; None for roles of other programs.

    Parameters
    ----------
    backend:
        ``engine.backend`` of the recipe: engines of vLLM have an environment of their own.
    """
    if role in (Role.ENGINE, Role.PREFILL, Role.DECODE) and backend == "vllm":
        return "vllm", ROLE_IMPORTS["vllm"]
    return _ROLES.get(role)


def check_role_packages(recipe: Loaded[Recipe], plan: Plan, site: Loaded[ClusterProfile]) -> list[str]:
    """Check that interpreters of roles have what these import, as far as that is seen from here.

    Returns
    -------
    list of str
        Why that could not be seen; empty where all is there.

    Raises
    ------
    ConfigError
        With each role whose interpreter lacks something.
    """
    notes, findings = [], []
    for group in plan.groups:
        needed = role_packages(group.role, recipe.value.engine.backend)
        python = group.python or plan.python or sys.executable
        # `check_pythons` reports a missing interpreter
        if needed is None or (plan.container is None and not Path(python).exists() and Path(python).parent.is_dir()):
            continue
        extra, packages = needed
        found = _lacking(plan, python, ("hpcrl", *packages))
        if isinstance(found, str):
            notes.append(f"what the {group.role} imports {found}")
        elif found:
            key = _python_key(group.role, site.value)
            what = f"{python}, the interpreter of {group.role}, has no {', '.join(found)}"
            hint = f"{install_command(extra, python=python)}, or name another in {key}"
            findings.append(Finding(site.where(key.removeprefix("cluster.")), key, what, hint))
    if findings:
        raise ConfigError(findings)
    return notes


def check_trial_packages(plan: Plan, python: str, role: Role = Role.ORCHESTRATOR) -> None:
    """Check that the interpreter of a role can try environments (UsageError with what it lacks)."""
    extra, packages = _ROLES[role]
    found = _lacking(plan, python, ("hpcrl", *packages))
    if found and not isinstance(found, str):
        raise UsageError(
            f"{python}, the interpreter of {role.value}, has no {', '.join(found)}\n"
            f"    hint: {install_command(extra, python=python)}, or name another in cluster.python_by_role.{role.value}"
        )


def _python_key(role: Role, site: ClusterProfile) -> str:
    """Return the key of the profile that names the interpreter of a role, or would name it."""
    engine = role in (Role.ENGINE, Role.PREFILL, Role.DECODE)
    by_role = {str(each) for each in site.python_by_role}
    if engine and role.value not in by_role:
        return (
            "cluster.vllm_python" if site.vllm_python and "engine" not in by_role else "cluster.python_by_role.engine"
        )
    return f"cluster.python_by_role.{role.value}"


def has_package(plan: Plan, python: str, package: str) -> bool | str:
    """Return whether an interpreter can import a package; where that is not seen, why, as the end of a sentence."""
    found = _lacking(plan, python, (package,))
    return found if isinstance(found, str) else not found


def _lacking(plan: Plan, python: str, packages: Sequence[str]) -> list[str] | str:
    """Return the packages that an interpreter lacks; where that is not seen, why, as the end of a sentence."""
    if plan.container is not None or not Path(python).is_file():
        where = "in the container" if plan.container is not None else f"visible here ({python})"
        return f"was not checked: its environment is not {where}"
    return _ask_lacking(python, tuple(packages), os.stat(python).st_mtime_ns)


@lru_cache(maxsize=64)
def _ask_lacking(python: str, packages: tuple[str, ...], _mtime_ns: int) -> list[str] | str:
    """Ask an interpreter once in the life of this process."""
    try:
        result = subprocess.run(
            [python, "-P", "-c", _LACKING, *packages], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"could not be checked: {error}"
    if result.returncode not in (0, _SOME_LACK):
        return f"could not be checked: {python} ended with an error"
    if not result.returncode:
        return []
    # a site's own start-up files may print, too
    answers = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("lacks ")]
    return answers[-1] if answers else list(packages)
