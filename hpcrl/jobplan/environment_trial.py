"""Tries environments of one's own before a submit: in a process of their own, with a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.environments import HostedEnv
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding, UsageError
from hpcrl.jobplan.packages import check_trial_packages
from hpcrl.jobplan.plan import absolute_paths
from hpcrl.jobplan.role_python import ask_role_python, environment_role, hidden_reason, role_python

_MODULE = "hpcrl.rollouts.environments.trial"
CHECK_MODULE = "hpcrl.rollouts.environments.task_check"
"""Program that plays policies with known rewards."""
DOING = "try the environments"
"""Description of the programs for messages."""
_START_S = 60.0
"""Seconds for the process itself, in addition to the limits of environments."""
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
    if not wanted or recipe.value.job.payload == "probe":
        return []
    if reason := hidden_reason(plan, site, what="they", role=environment_role(plan)):
        return [f"{_NOT_HERE}: {reason}"]
    check_environment_packages(plan)
    timeout_s = _START_S + sum(each.start_timeout_s for each in wanted)
    answer = _ask("check", {}, recipe, plan, site, timeout_s=timeout_s)
    if answer["findings"]:
        raise ConfigError(_findings(recipe, answer, site))
    # an earlier hpcrl in that interpreter returns no notes
    return [str(note) for note in answer.get("notes", ())]


def try_environment(
    recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile, *, name: str, task: int, timeout_s: float
) -> dict[str, Any]:
    """Return a prompt, a demonstration and a rollout of an environment (see `hpcrl.rollouts.environments.trial`).

    Raises
    ------
    ConfigError
        It cannot be made.
    UsageError
        It cannot be tried from here, or took longer than ``timeout_s``.
    """
    if reason := hidden_reason(plan, site, what="they", role=environment_role(plan)):
        raise UsageError(f"{_NOT_HERE}: {reason}\n    hint: try it with --cluster local, or on a node")
    check_environment_packages(plan)
    answer = _ask("try", {"name": name, "task": task}, recipe, plan, site, timeout_s=timeout_s)
    if answer.get("findings"):
        raise ConfigError(_findings(recipe, answer, site))
    return answer


def check_environment_tasks(
    recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile, *, names: Sequence[str], tasks: int, timeout_s: float
) -> dict[str, Any]:
    """Play policies with known rewards on tasks (see `hpcrl.rollouts.environments.task_check`).

    Raises
    ------
    UsageError
        They cannot be tried from here, or took longer than ``timeout_s``.
    """
    if reason := hidden_reason(plan, site, what="they", role=environment_role(plan)):
        where = "with --job, on a node" if site.uses_slurm else "on a node"
        raise UsageError(f"{_NOT_HERE}: {reason}\n    hint: try it with --cluster local, or {where}")
    check_environment_packages(plan)
    request = {"names": list(names), "tasks": tasks}
    return _ask("tasks", request, recipe, plan, site, timeout_s=timeout_s, module=CHECK_MODULE)


def check_environment_packages(plan: Plan) -> None:
    """Check that the interpreter of the role that makes environments can try them (UsageError with what it lacks)."""
    role = environment_role(plan)
    check_trial_packages(plan, role_python(plan, role), role)


def _findings(recipe: Loaded[Recipe], answer: Mapping[str, Any], site: ClusterProfile) -> list[Finding]:
    """Return the findings of the other process, with the line of the recipe."""
    names = {each.name: number for number, each in enumerate(recipe.value.environments)}

    def where(key: str) -> str:
        for name, number in names.items():
            # names may have dots
            if f"{key}.".startswith(f"environments.{name}."):
                return recipe.where(f"environments.{number}{key.removeprefix(f'environments.{name}')}")
        return recipe.where("environments")

    in_job = " of the profile's env (a job does not inherit that of your shell)" if site.uses_slurm else ""
    hints = [f["hint"] + (in_job if f["hint"].endswith("PYTHONPATH") else "") for f in answer["findings"]]
    return [
        Finding(where(f["key"]), f["key"], f["what"], hint) for f, hint in zip(answer["findings"], hints, strict=True)
    ]


def _ask(
    what: str,
    request: dict[str, Any],
    recipe: Loaded[Recipe],
    plan: Plan,
    site: ClusterProfile,
    *,
    timeout_s: float,
    module: str = _MODULE,
) -> dict[str, Any]:
    resolved = absolute_paths(recipe.value, Path.cwd())
    return ask_role_python(
        module,
        what,
        request={"recipe": resolved.model_dump(mode="json"), **request},
        plan=plan,
        site=site,
        doing=DOING,
        timeout_s=timeout_s,
        slow_hint="find out what they wait for, or raise start_timeout_s",
        role=environment_role(plan),
    )
