"""Run a program of hpcrl with the interpreter of a run's role, before a run or after it.

Code of the user is imported there as it is in a run: modules are found where the role finds them. The shell's
``PYTHONPATH`` counts for a local run, and for a job only the values that the profile sets or passes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Plan, Role
from hpcrl.errors import UsageError
from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.storage.trusted_paths import read_secret


def role_python(plan: Plan, role: Role | None = Role.ORCHESTRATOR) -> str:
    """Return the interpreter of a role of a plan; None is the supervisor."""
    if role is None:
        return sys.executable
    group = next((group for group in plan.groups if group.role is role), None)
    return (group.python if group is not None else None) or plan.python or sys.executable


def environment_role(plan: Plan) -> Role:
    """Return the role whose processes make environments."""
    return Role.ENV if any(group.role is Role.ENV for group in plan.groups) else Role.ORCHESTRATOR


def hidden_reason(plan: Plan, site: ClusterProfile, *, what: str, role: Role = Role.ORCHESTRATOR) -> str:
    """Return why ``what`` (a plural) cannot be made here with the role's interpreter; empty where they can."""
    if plan.container is not None:
        return f"{what} are made in the container"
    if not Path(role_python(plan, role)).is_file():
        return f"the {role.value}'s Python, {role_python(plan, role)}, is not visible here"
    if site.uses_slurm:
        entries = _variables(plan, site, role).get("PYTHONPATH", "").split(os.pathsep)
        if away := [entry for entry in entries if entry and not Path(entry).exists()]:
            return f"PYTHONPATH names {', '.join(away)}, which is not visible here"
    return ""


def outlet_variables(site: ClusterProfile) -> dict[str, str]:
    """Return ``env`` and ``secrets`` of a profile, which sinks and notifiers get (`hpcrl.supervisor.outlets`).

    A file of ``secrets`` that cannot be read here is left out: it may be one that only nodes see.
    """
    found = dict(site.env)
    for name, file in site.secrets.items():
        with contextlib.suppress(OSError):
            found[name] = read_secret(Path(os.path.expandvars(file)).expanduser())
    return found


def outlet_environment(site: ClusterProfile) -> dict[str, str]:
    """Return the environment of a sink or a notifier that is started here and not in a job."""
    return with_safe_path({**os.environ, **outlet_variables(site)})


def _variables(plan: Plan, site: ClusterProfile, role: Role | None) -> dict[str, str]:
    """Return the environment that the role has, as far as it matters for imports."""
    variables = dict(os.environ)
    if isinstance(site, SlurmCluster) and "PYTHONPATH" not in site.launch.inherit:
        variables.pop("PYTHONPATH", None)
    if role is None:
        variables |= outlet_variables(site)
    for group in plan.groups:
        if group.role is role:
            # values that depend on a node are unknown here
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
    role: Role | None = Role.ORCHESTRATOR,
) -> dict[str, Any]:
    """Run ``module`` with a request on its standard input, and return the JSON object that it prints.

    Parameters
    ----------
    doing:
        Description for messages: ``try the environments``.
    timeout_s:
        Longest time in seconds; None: no limit.
    slow_hint:
        What to do where that was too short.
    role:
        Whose interpreter and variables; None: those of the supervisor.

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
