"""The check of a recipe's environments, in a job on a node where they will run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.environment_sandboxes import sandbox_settings
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.jobplan.environment_trial import CHECK_MODULE, DOING, check_environment_packages
from hpcrl.jobplan.preflight import check_secrets
from hpcrl.jobplan.role_python import environment_role, role_python
from hpcrl.processes.interpreter import module_command
from hpcrl.sites.role_job import ask_role_node, role_alone
from hpcrl.slurm.client import SlurmClient
from hpcrl.submit.prepare import PreparedRun

_AT_ONCE = 4
"""Rollouts that the check plays at once."""
_MEMORY_GIB = 4.0
"""Memory in GiB of the check itself, without sandboxes."""


class NodeCheck(NamedTuple):
    """Result of the check on a node: Slurm's names of its job's nodes, the job, and the answer of the check."""

    nodes: list[str]
    job_id: int
    answer: dict[str, Any]


def check_environments_in_job(
    run: PreparedRun,
    *,
    names: Sequence[str],
    tasks: int,
    client: Callable[[], SlurmClient],
    root: Callable[[SlurmCluster], Path],
    timeout_s: float,
    wait_s: float,
    say: Callable[[str], None],
) -> NodeCheck:
    """Play policies with known rewards on tasks of environments, on a node of the role that runs environments.

    Parameters
    ----------
    run:
        Recipe and profile, as prepared for a run.
    names, tasks:
        Environments, and the number of tasks of each.
    client, root:
        Return the client of Slurm, and the runs root of a profile.
    timeout_s:
        Maximum time of the check in seconds.
    wait_s:
        Maximum wait in the queue in seconds.
    say:
        Takes lines on what becomes of the job.

    Raises
    ------
    UsageError
        The profile has no Slurm, a file of secrets or a package is missing, or the job did not run the check.
    """
    cluster = run.profile
    if not isinstance(cluster, SlurmCluster):
        raise UsageError(
            f"the profile {cluster.name} is of a machine without Slurm: it has no nodes for a job\n"
            "    hint: leave out --job to check here, or name the profile of a cluster with --cluster"
        )
    plan = run.outlined()
    role = environment_role(plan)
    check_secrets(plan, run.site)
    check_environment_packages(plan)
    alone = role_alone(plan, role, memory_gib=_memory_gib(run.resolved, names))
    request = {"recipe": run.resolved.model_dump(mode="json"), "names": list(names), "tasks": tasks}
    python = role_python(plan, role)
    found = ask_role_node(
        cluster,
        alone,
        client=client(),
        root=root(cluster),
        command=lambda directory: module_command(python, CHECK_MODULE, "tasks", str(directory)),
        files={"request.json": msgspec.json.encode(request)},
        answer="answer.json",
        doing=DOING,
        timeout_s=timeout_s,
        wait_s=wait_s,
        say=say,
    )
    return NodeCheck(found.nodes, found.job_id, msgspec.json.decode(found.text))


def _memory_gib(recipe: Recipe, names: Sequence[str]) -> float:
    """Return the memory in GiB that the check needs with the sandboxes of its rollouts."""
    environments = [each for each in recipe.environments if each.name in names]
    largest = max((s.memory_gib for each in environments for s in sandbox_settings(each)), default=0.0)
    return _MEMORY_GIB + _AT_ONCE * largest
