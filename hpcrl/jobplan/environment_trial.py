"""Tries environments of one's own before a submit: in a process of their own, with a deadline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.environments import HostedEnv
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding, UsageError
from hpcrl.jobplan.packages import check_trial_packages
from hpcrl.jobplan.plan import absolute_paths
from hpcrl.jobplan.role_python import ask_role_python, hidden_reason, role_python

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
    if not wanted or recipe.value.job.payload == "probe":
        return []
    if reason := hidden_reason(plan, site, what="they"):
        return [f"{_NOT_HERE}: {reason}"]
    check_trial_packages(plan, role_python(plan))
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
    if reason := hidden_reason(plan, site, what="they"):
        raise UsageError(f"{_NOT_HERE}: {reason}\n    hint: try it with --cluster local, or on a node")
    check_trial_packages(plan, role_python(plan))
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


def _ask(
    what: str, request: dict[str, Any], recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile, *, timeout_s: float
) -> dict[str, Any]:
    resolved = absolute_paths(recipe.value, Path.cwd())
    return ask_role_python(
        _MODULE,
        what,
        request={"recipe": resolved.model_dump(mode="json"), **request},
        plan=plan,
        site=site,
        doing="try the environments",
        timeout_s=timeout_s,
        slow_hint="look at what they wait for, or raise start_timeout_s",
    )
