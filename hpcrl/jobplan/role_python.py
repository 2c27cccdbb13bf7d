"""Runs a program of ours with the interpreter of a run's role, before a run or after it.

Code of the user is imported there as it is in a run: modules are found where the role finds them. The shell's
``PYTHONPATH`` counts for a local run, and for a job only what the profile says or lets through.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Plan, Role
from hpcrl.errors import UsageError
from hpcrl.interpreter import module_command, with_safe_path

__all__ = ["ask_role_python", "hidden_reason", "role_python"]


def role_python(plan: Plan, role: Role = Role.ORCHESTRATOR) -> str:
    """Return the interpreter of a role of a plan."""
    group = next((group for group in plan.groups if group.role is role), None)
    return (group.python if group is not None else None) or plan.python or sys.executable


def hidden_reason(plan: Plan, site: ClusterProfile, *, what: str, role: Role = Role.ORCHESTRATOR) -> str:
    """Return why ``what`` (a plural) cannot be made here with the role's interpreter; empty where they can."""
    if plan.container is not None:
        return f"{what} are made in the container"
    if not Path(role_python(plan, role)).is_file():
        return f"the {role.value}'s Python, {role_python(plan, role)}, is not visible here"
    if isinstance(site, SlurmCluster):
        entries = _variables(plan, site, role).get("PYTHONPATH", "").split(os.pathsep)
        if away := [entry for entry in entries if entry and not Path(entry).exists()]:
            return f"PYTHONPATH names {', '.join(away)}, which is not visible here"
    return ""


def _variables(plan: Plan, site: ClusterProfile, role: Role) -> dict[str, str]:
    """Return the environment that the role has, as far as it matters for imports."""
    variables = dict(os.environ)
    if isinstance(site, SlurmCluster) and "PYTHONPATH" not in site.launch.inherit:
        variables.pop("PYTHONPATH", None)
    for group in plan.groups:
        if group.role is role:
            # what names a place on a node is not known here
            variables |= {name: value for name, value in group.env.items() if "{node_" not in value}
    return with_safe_path(variables)


def ask_role_python(
    module: str,
    *arguments: str,
    request: dict[str, Any],
    plan: Plan,
    site: ClusterProfile,
    doing: str,
    timeout_s: float | None,
    slow_hint: str,
    role: Role = Role.ORCHESTRATOR,
) -> dict[str, Any]:
    """Run ``module`` with a request on its standard input, and return the JSON object that it prints.

    Parameters
    ----------
    doing:
        What it does, for messages: ``try the environments``.
    timeout_s:
        Longest time in seconds; None: no limit.
    slow_hint:
        What to do where that was too short.

    Raises
    ------
    UsageError
        It does not start, fails, or takes too long.
    """
    python = role_python(plan, role)
    try:
        result = subprocess.run(
            module_command(python, module, *arguments),
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            env=_variables(plan, site, role),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"it took longer than {timeout_s:g} s to {doing}, and was ended\n    hint: {slow_hint}"
        ) from None
    except OSError as error:
        raise UsageError(f"{python} cannot {doing}: {error}") from error
    if result.returncode:
        raise UsageError(
            f"{python} cannot {doing}: it ended with {result.returncode} (what it printed is above)\n"
            "    hint: hpcrl must be installed for this interpreter"
        )
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer
