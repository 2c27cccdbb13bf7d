"""Tries environments of one's own before a submit: in a process of their own, with a deadline.

The interpreter is that of the orchestrator, and modules are found where it will find them: the shell's ``PYTHONPATH``
counts for a local run, and for a job only what the profile says or lets through.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.environments import HostedEnv
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan, Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding, UsageError
from hpcrl.interpreter import module_command, with_safe_path
from hpcrl.jobplan.packages import check_trial_packages
from hpcrl.jobplan.plan import absolute_paths

__all__ = ["check_environments", "try_environment"]

_MODULE = "hpcrl.rollouts.environments.trial"
_START_S = 60.0
"""For the process itself, beside what environments may take."""
_NOT_HERE = "environments were not tried"


def check_environments(recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile) -> list[str]:
    """Import and make the environments of one's own that the recipe wants tried.

    Returns
    -------
    list of str
        Why they could not be tried from here, or what is odd about them, for the user to read.

    Raises
    ------
    ConfigError
        With each that cannot be made.
    UsageError
        The interpreter cannot try them.
    """
    wanted = [each for each in recipe.value.environments if isinstance(each, HostedEnv) and each.try_before_submit]
    if not wanted or recipe.value.job.payload != "roles":
        return []
    if reason := _hidden(plan, site):
        return [f"{_NOT_HERE}: {reason}"]
    check_trial_packages(plan, _interpreter(plan))
    timeout_s = _START_S + sum(each.start_timeout_s for each in wanted)
    answer = _ask("check", {}, recipe, plan, site, timeout_s=timeout_s)
    if answer["findings"]:
        raise ConfigError(_findings(recipe, answer, site))
    # an earlier hpcrl of that interpreter has no notes
    return [str(note) for note in answer.get("notes", ())]


def try_environment(
    recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile, *, name: str, task: int, timeout_s: float
) -> dict[str, Any]:
    """A prompt, a demonstration and a rollout of an environment (see `hpcrl.rollouts.environments.trial`).

    Raises
    ------
    ConfigError
        It cannot be made.
    UsageError
        It cannot be tried from here, or took longer than ``timeout_s``.
    """
    if reason := _hidden(plan, site):
        raise UsageError(f"{_NOT_HERE}: {reason}\n    hint: try it with --cluster local, or on a node")
    check_trial_packages(plan, _interpreter(plan))
    answer = _ask("try", {"name": name, "task": task}, recipe, plan, site, timeout_s=timeout_s)
    if answer.get("findings"):
        raise ConfigError(_findings(recipe, answer, site))
    return answer


def _findings(recipe: Loaded[Recipe], answer: Mapping[str, Any], site: ClusterProfile) -> list[Finding]:
    """What the other process found, with the line of the recipe."""
    names = {each.name: number for number, each in enumerate(recipe.value.environments)}

    def where(key: str) -> str:
        for name, number in names.items():
            # names may have dots
            if f"{key}.".startswith(f"environments.{name}."):
                return recipe.where(f"environments.{number}{key.removeprefix(f'environments.{name}')}")
        return recipe.where("environments")

    in_job = " of the profile's env (a job has not that of your shell)" if isinstance(site, SlurmCluster) else ""
    hints = [f["hint"] + (in_job if f["hint"].endswith("PYTHONPATH") else "") for f in answer["findings"]]
    return [
        Finding(where(f["key"]), f["key"], f["what"], hint) for f, hint in zip(answer["findings"], hints, strict=True)
    ]


def _interpreter(plan: Plan) -> str:
    group = next((group for group in plan.groups if group.role is Role.ORCHESTRATOR), None)
    return (group.python if group is not None else None) or plan.python or sys.executable


def _hidden(plan: Plan, site: ClusterProfile) -> str:
    """Why environments cannot be tried here; empty where they can."""
    if plan.container is not None:
        return "they are made in the container"
    if not Path(_interpreter(plan)).is_file():
        return f"the orchestrator's Python, {_interpreter(plan)}, is not visible here"
    if isinstance(site, SlurmCluster):
        entries = _variables(plan, site).get("PYTHONPATH", "").split(os.pathsep)
        if away := [entry for entry in entries if entry and not Path(entry).exists()]:
            return f"PYTHONPATH names {', '.join(away)}, which is not visible here"
    return ""


def _variables(plan: Plan, site: ClusterProfile) -> dict[str, str]:
    """The environment that the orchestrator will have, as far as it matters for imports."""
    variables = dict(os.environ)
    if isinstance(site, SlurmCluster) and "PYTHONPATH" not in site.launch.inherit:
        variables.pop("PYTHONPATH", None)
    for group in plan.groups:
        if group.role is Role.ORCHESTRATOR:
            # what names a place on a node is not known here
            variables |= {name: value for name, value in group.env.items() if "{node_" not in value}
    return with_safe_path(variables)


def _ask(
    what: str, request: dict[str, Any], recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile, *, timeout_s: float
) -> dict[str, Any]:
    python = _interpreter(plan)
    resolved = absolute_paths(recipe.value, Path.cwd())
    text = json.dumps({"recipe": resolved.model_dump(mode="json"), **request})
    try:
        result = subprocess.run(
            module_command(python, _MODULE, what),
            input=text.encode(),
            stdout=subprocess.PIPE,
            env=_variables(plan, site),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"trying the environments took longer than {timeout_s:g} s, and was ended\n"
            "    hint: look at what they wait for, or raise start_timeout_s"
        ) from None
    except OSError as error:
        raise UsageError(f"{python} cannot try the environments: {error}") from error
    if result.returncode:
        raise UsageError(
            f"{python} cannot try the environments: it ended with {result.returncode} (what it printed is above)\n"
            "    hint: hpcrl must be installed for this interpreter"
        )
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer
