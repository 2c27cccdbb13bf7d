"""The plan of a run: role groups, their places, limits."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.cluster_slurm import NoContainer
from hpcrl.config.environments import HarnessEnv, SweEnv, TaskFileEnv, VerifiersEnv
from hpcrl.config.layout import AttemptPolicy, Container, ElasticPolicy
from hpcrl.config.mounts import check_mounted
from hpcrl.config.plan import Plan, WatchPolicy
from hpcrl.config.recipe import Recipe
from hpcrl.config.runs_root import absolute_path
from hpcrl.jobplan.groups import make_groups
from hpcrl.jobplan.layout import place_groups

_RETRIES = 3
"""Default of `job.retry_failures` under Slurm, so that a run continues unattended."""


def absolute_paths(recipe: Recipe, cwd: Path) -> Recipe:
    """Return the recipe with absolute paths, so that roles may run in any directory."""
    model = recipe.model.model_copy(update={"path": str(absolute_path(recipe.model.path, cwd))})
    environments = tuple(
        each.model_copy(update=_absolute_files(each, cwd))
        if isinstance(each, TaskFileEnv | SweEnv | VerifiersEnv)
        else each
        for each in recipe.environments
    )
    changed: dict[str, object] = {"model": model, "environments": environments}
    if recipe.sft is not None:
        given = {"data": recipe.sft.data, "held_out_data": recipe.sft.held_out_data}
        files = {key: str(absolute_path(path, cwd)) for key, path in given.items() if path is not None}
        changed["sft"] = recipe.sft.model_copy(update=files)
    return recipe.model_copy(update=changed)


def _absolute_files(environment: TaskFileEnv | SweEnv | VerifiersEnv, cwd: Path) -> dict[str, object]:
    names: tuple[str, ...] = ("path", "held_out_path")
    if isinstance(environment, SweEnv):
        names = ("tasks", "trees", "images")
    elif isinstance(environment, VerifiersEnv):
        names = ("path",)
    given = {name: getattr(environment, name) for name in names}
    found: dict[str, object] = {key: str(absolute_path(path, cwd)) for key, path in given.items() if path is not None}
    if isinstance(environment, VerifiersEnv) and "/" in (environment.python or ""):
        # a name without a directory is looked for on the path
        found["python"] = _absolute(str(environment.python), cwd)
    if isinstance(environment, HarnessEnv):
        found["command"] = tuple(
            str(absolute_path(word, cwd)) if word.startswith("./") else word for word in environment.command
        )
        if environment.sandbox is not None:
            mounts = {inside: str(absolute_path(path, cwd)) for inside, path in environment.sandbox.mounts.items()}
            image = environment.sandbox.image
            changed = {"mounts": mounts, "image": None if image is None else str(absolute_path(image, cwd))}
            found["sandbox"] = environment.sandbox.model_copy(update=changed)
    return found


def absolute_site_paths(cluster: ClusterProfile, cwd: Path) -> ClusterProfile:
    """Return the profile with absolute paths of the directories and interpreters that roles use."""
    cluster = _absolute_pythons(cluster, cwd)
    secrets = {name: _absolute(path, cwd) for name, path in cluster.secrets.items()}
    cluster = cluster.model_copy(update={"secrets": secrets})
    if not isinstance(cluster, SlurmCluster):
        return cluster
    given = {"cache": cluster.paths.cache, "scratch": cluster.paths.scratch}
    absolute = {name: str(absolute_path(path, cwd)) for name, path in given.items() if path is not None}
    return cluster.model_copy(update={"paths": cluster.paths.model_copy(update=absolute)})


def _absolute_pythons(cluster: ClusterProfile, cwd: Path) -> ClusterProfile:
    """Return the profile with absolute interpreters; in containers paths are the image's own."""
    if isinstance(cluster, SlurmCluster) and not isinstance(cluster.container, NoContainer):
        return cluster
    by_role = {role: _absolute(python, cwd) for role, python in cluster.python_by_role.items()}
    vllm = None if cluster.vllm_python is None else _absolute(cluster.vllm_python, cwd)
    return cluster.model_copy(update={"python_by_role": by_role, "vllm_python": vllm})


def _absolute(path: str, cwd: Path) -> str:
    """Return an absolute path, links kept.

    The python of a virtual environment is a link, and is another one behind it.
    """
    return os.path.normpath(cwd / Path(os.path.expandvars(path)).expanduser())


def default_run_name(recipe: Recipe, now_s: float) -> str:
    """Return the name ``<recipe>-<date>-<time>`` in local time."""
    return f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}"


def make_plan(recipe: Recipe, cluster: ClusterProfile, run_name: str, run_dir: Path) -> Plan:
    """Resolve a recipe on a cluster. Pure: same input, same plan.

    Parameters
    ----------
    recipe:
        With absolute paths (see `absolute_paths`).
    cluster:
        The site.
    run_name, run_dir:
        Name and directory of the run.
    """
    groups = make_groups(recipe, cluster, run_name)
    plan = Plan(
        run=run_name,
        recipe=recipe.name,
        cluster=cluster.name,
        run_dir=run_dir,
        groups=tuple(groups),
        first_port=cluster.ports.first,
        last_port=cluster.ports.last,
        time_limit_s=(recipe.job.time_limit_h or cluster.limits.time_limit_h) * 3600.0,
        attempts=_local_attempts(recipe),
        watch=WatchPolicy(
            floor_s=recipe.supervision.hang_floor_s,
            ceiling_s=recipe.supervision.hang_ceiling_s,
            update_timeout_s=recipe.handoff.update_timeout_s,
        ),
        sinks=(*recipe.sinks, *cluster.sinks),
        notify=(*recipe.notify, *cluster.notify),
    )
    if not isinstance(cluster, SlurmCluster):
        return plan
    layout, groups = place_groups(groups, recipe, cluster)
    placed = {
        "groups": tuple(groups),
        "layout": layout,
        "container": _container(recipe, cluster, run_dir),
        "python": None if isinstance(cluster.container, NoContainer) else cluster.container.python,
        "attempts": _attempts(recipe, cluster),
        "elastic": _elastic(recipe),
        "scratch": cluster.paths.scratch,
    }
    return plan.model_copy(update=placed)


def _local_attempts(recipe: Recipe) -> AttemptPolicy:
    retries = recipe.job.retry_failures or 0
    if not retries:
        return AttemptPolicy(on_change=recipe.job.on_change)
    return AttemptPolicy(
        on_change=recipe.job.on_change,
        max_attempts=recipe.job.max_attempts,
        max_without_progress=recipe.job.max_attempts_without_progress,
        retries=retries,
    )


def _attempts(recipe: Recipe, cluster: SlurmCluster) -> AttemptPolicy:
    job, can = recipe.job, cluster.capabilities
    requeue = job.requeue == "always" or (job.requeue == "auto" and can.requeue and can.scontrol_on_nodes)
    retries = _RETRIES if job.retry_failures is None else job.retry_failures
    return AttemptPolicy(
        on_change=recipe.job.on_change,
        requeue=requeue,
        max_attempts=job.max_attempts if requeue or retries else 1,
        max_without_progress=job.max_attempts_without_progress if requeue or retries else 1,
        retries=retries,
        exclude_s=job.exclude_failed_nodes_h * 3600.0,
        signal_lead_s=cluster.limits.signal_lead_s,
        saves=job.payload == "roles",
    )


def _elastic(recipe: Recipe) -> ElasticPolicy:
    job = recipe.job
    return ElasticPolicy(
        min_replicas=job.min_replicas,
        wait_s=job.replica_wait_h * 3600.0,
        hold_s=job.replica_hold_h * 3600.0,
        max_resubmits=job.max_replica_resubmits,
    )


def _container(recipe: Recipe, cluster: SlurmCluster, run_dir: Path) -> Container | None:
    """Return the container with the run's own directories mounted under their own names."""
    settings = cluster.container
    if isinstance(settings, NoContainer):
        return None
    own = [str(run_dir.parent), cluster.paths.cache, cluster.paths.scratch, recipe.model.path]
    for what, path in zip(("the runs root", "paths.cache", "paths.scratch", "model.path"), own, strict=True):
        if path is not None:
            check_mounted(path, what)
    data = [] if recipe.sft is None else [recipe.sft.data, recipe.sft.held_out_data]
    read = [path for path in data if path is not None]
    for path in read:
        check_mounted(path, "the data of sft")
    for name, path in cluster.secrets.items():
        check_mounted(path, f"the file of secret {name}")
    mounts = [f"{path}:{path}" for path in dict.fromkeys(own) if path is not None]
    mounts += [f"{path}:{path}:ro" for path in dict.fromkeys((*read, *cluster.secrets.values()))]
    return Container(
        kind=settings.kind,
        image=settings.image,
        mounts=(*mounts, *(mount for mount in settings.mounts if mount not in mounts)),
        mount_home=settings.mount_home,
    )
