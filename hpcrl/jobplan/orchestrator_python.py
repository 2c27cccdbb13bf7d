"""Runs a program of ours with the interpreter of a run's orchestrator, before a run or after it.

Code of the user is imported there as it is in a run: modules are found where the orchestrator finds them. The shell's
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

__all__ = ["ask_orchestrator_python", "hidden_reason", "orchestrator_python"]


def orchestrator_python(plan: Plan) -> str:
    """Return the interpreter of a plan's orchestrator."""
    group = next((group for group in plan.groups if group.role is Role.ORCHESTRATOR), None)
    return (group.python if group is not None else None) or plan.python or sys.executable


def hidden_reason(plan: Plan, site: ClusterProfile, *, what: str) -> str:
    """Return why ``what`` (a plural) cannot be made here with the orchestrator's interpreter; empty where they can."""
    if plan.container is not None:
        return f"{what} are made in the container"
    if not Path(orchestrator_python(plan)).is_file():
        return f"the orchestrator's Python, {orchestrator_python(plan)}, is not visible here"
    if isinstance(site, SlurmCluster):
        entries = _variables(plan, site).get("PYTHONPATH", "").split(os.pathsep)
        if away := [entry for entry in entries if entry and not Path(entry).exists()]:
            return f"PYTHONPATH names {', '.join(away)}, which is not visible here"
    return ""


def _variables(plan: Plan, site: ClusterProfile) -> dict[str, str]:
    """Return the environment that the orchestrator has, as far as it matters for imports."""
    variables = dict(os.environ)
    if isinstance(site, SlurmCluster) and "PYTHONPATH" not in site.launch.inherit:
        variables.pop("PYTHONPATH", None)
    for group in plan.groups:
        if group.role is Role.ORCHESTRATOR:
            # what names a place on a node is not known here
            variables |= {name: value for name, value in group.env.items() if "{node_" not in value}
    return with_safe_path(variables)


def ask_orchestrator_python(
    module: str,
    *arguments: str,
    request: dict[str, Any],
    plan: Plan,
    site: ClusterProfile,
    doing: str,
    timeout_s: float | None,
) -> dict[str, Any]:
    """Run ``module`` with a request on its standard input, and return the JSON object that it prints.

    Parameters
    ----------
    doing:
        What it does, for messages: ``try the environments``.
    timeout_s:
        Longest time in seconds; None: no limit.

    Raises
    ------
    UsageError
        It does not start, fails, or takes too long.
    """
    python = orchestrator_python(plan)
    try:
        result = subprocess.run(
            module_command(python, module, *arguments),
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            env=_variables(plan, site),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"it took longer than {timeout_s:g} s to {doing}, and was ended\n"
            "    hint: look at what they wait for, or raise start_timeout_s"
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
