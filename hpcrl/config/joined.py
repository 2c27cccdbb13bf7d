"""A recipe and a profile for one run: what the recipe's job, or the environment, says instead of the profile.

One profile serves all projects of a site: account, quality of service, reservation and partition may come from the
recipe (or ``--set``), then from the variables that sbatch and srun read, then from the profile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.cluster_slurm import PlacementConfig
from hpcrl.config.job import JobConfig
from hpcrl.config.load import Loaded, UnreadableError, load_cluster, load_recipe
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.config.runs_root import absolute_path
from hpcrl.config.unusable_values import UnusableValueError
from hpcrl.errors import ConfigError, Finding

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
"""``OWNER/NAME`` or ``OWNER/NAME@REVISION``, as `hpcrl.models.hub` reads them."""
_CHARGES = ("account", "qos", "reservation")
_VARIABLES = {key: (f"SBATCH_{key.upper()}", f"SLURM_{key.upper()}") for key in (*_CHARGES, "partition")}
"""By key of ``job``: the first that is set counts."""


def load_both(
    recipe: str,
    cluster: str | Loaded[ClusterProfile],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    in_job: bool = False,
) -> tuple[Loaded[Recipe], Loaded[ClusterProfile]]:
    """Load a recipe and a profile for a run of the one on the other (ConfigError with every finding).

    Parameters
    ----------
    recipe, cluster, overrides:
        See `hpcrl.config.load`; a profile may also be one that is loaded, as that of a run.
    environ:
        Variables of the calling user; a recipe on a site without Slurm takes nothing from them.
    in_job:
        The run is to be inside of the job that we are called in.
    """
    loaded, site = _load_all(recipe, cluster, overrides)
    if isinstance(site.value, SlurmCluster):
        loaded = _inside(loaded, site.value, environ) if in_job else with_environment(loaded, environ)
    elif in_job:
        raise ConfigError(
            [
                Finding(
                    str(site.source),
                    "kind",
                    "is not a Slurm site, and so has no allocation to join",
                    "leave --in-job out",
                )
            ]
        )
    return _with_downloaded(loaded, site.value), for_job(loaded, site)


def _with_downloaded(recipe: Loaded[Recipe], site: ClusterProfile) -> Loaded[Recipe]:
    """Return the recipe with the directory of a published model that it names by its id, where the site has that model.

    A directory of this name below the working directory comes first.
    """
    given, here = recipe.value.model.path, Path.cwd()
    if not _HUB_ID.fullmatch(given) or (here / given).exists():
        return recipe
    directory = absolute_path(site.paths.models_root, here) / given
    if not (directory / "config.json").is_file():
        return recipe
    model = recipe.value.model.model_copy(update={"path": str(directory)})
    return replace(recipe, value=recipe.value.model_copy(update={"model": model}))


def _load_all(
    recipe: str, cluster: str | Loaded[ClusterProfile], overrides: Sequence[str]
) -> tuple[Loaded[Recipe], Loaded[ClusterProfile]]:
    """Load both; where one has values that cannot be used, say also what is wrong with the other and with the rules."""
    findings, loaded, site = list[Finding](), None, None
    try:
        loaded = load_recipe(recipe, overrides)
    except ConfigError as error:
        findings += error.findings
        loaded = error.repaired if isinstance(error, UnreadableError) else None
    try:
        site = load_cluster(cluster) if isinstance(cluster, str) else cluster
    except ConfigError as error:
        findings += error.findings
        site = error.repaired if isinstance(error, UnreadableError) else None
    if not findings:
        assert loaded is not None
        assert site is not None
        return loaded, site
    if loaded is not None and site is not None:
        try:
            check_rules(loaded, for_job(loaded, site))
        except ConfigError as error:
            findings += error.findings
        except UnusableValueError:
            pass  # what all rules need to know is wrong
    raise ConfigError(findings)


def with_environment(recipe: Loaded[Recipe], environ: Mapping[str, str]) -> Loaded[Recipe]:
    """Return the recipe with account, quality of service, reservation and partition of the environment where unset.

    Raises
    ------
    ConfigError
        A variable holds a value that Slurm would not accept.
    """
    written = {str(path[1]) for path in recipe.origins if len(path) > 1 and path[0] == "job"}
    values, names = _read(environ, [key for key in _VARIABLES if key not in written])
    job = recipe.value.job.model_copy(update=values)
    origins = recipe.origins | {("job", key): f"${name}" for key, name in names.items()}
    return replace(recipe, value=recipe.value.model_copy(update={"job": job}), origins=origins)


def _inside(recipe: Loaded[Recipe], site: SlurmCluster, environ: Mapping[str, str]) -> Loaded[Recipe]:
    """Return the recipe inside an allocation: the layout ``single``, and the partition of the existing job."""
    job = recipe.value.job
    findings = []
    if job.layout not in ("auto", "single"):
        what = f"{job.layout!r} needs jobs of its own; an allocation has one set of nodes for all roles"
        findings.append(Finding(recipe.where("job.layout"), "job.layout", what, "set it to single, or to auto"))
    if job.requeue == "always":
        what = "the job of a shell is never requeued"
        findings.append(Finding(recipe.where("job.requeue"), "job.requeue", what, "set it to auto"))
    partition = environ.get("SLURM_JOB_PARTITION", "")
    if partition and partition not in site.partitions:
        what = f"the job of this shell is in {partition!r}, which {site.name} does not describe"
        findings.append(Finding("$SLURM_JOB_PARTITION", "job.partition", what, "describe it in the profile"))
    if findings:
        raise ConfigError(findings)
    origins = recipe.origins | {("job", "layout"): "--in-job"}
    if partition:
        origins["job", "partition"] = "$SLURM_JOB_PARTITION"
    changed = job.model_copy(update={"layout": "single", "partition": partition or job.partition})
    return replace(recipe, value=recipe.value.model_copy(update={"job": changed}), origins=origins)


def with_account_from_env(site: SlurmCluster, environ: Mapping[str, str]) -> SlurmCluster:
    """Return the profile with the environment's account, quality of service and reservation, for jobs outside runs.

    Raises
    ------
    ConfigError
        A variable holds a value that Slurm would not accept.
    """
    values, _ = _read(environ, _CHARGES)
    partitions = {name: partition.model_copy(update=values) for name, partition in site.partitions.items()}
    return site.model_copy(update={"partitions": partitions})


def _read(environ: Mapping[str, str], keys: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the values, and the names of variables, by key of ``job``."""
    values, found = {}, {}
    for key in keys:
        # inside a job the variables SLURM_* describe that job
        names = _VARIABLES[key][:1] if "SLURM_JOB_ID" in environ else _VARIABLES[key]
        name = next((name for name in names if environ.get(name)), None)
        if name is None:
            continue
        try:
            JobConfig.model_validate({key: environ[name]})
        except ValidationError:
            what = f"{environ[name]!r} is not valid for Slurm"
            raise ConfigError([Finding(f"${name}", f"job.{key}", what, f"unset {name}, or set job.{key}")]) from None
        values[key], found[key] = environ[name], name
    return values, found


def for_job(recipe: Loaded[Recipe], cluster: Loaded[ClusterProfile]) -> Loaded[ClusterProfile]:
    """Return the profile as a run of the recipe uses it. A second application changes nothing.

    Raises
    ------
    ConfigError
        ``job.partition`` names a partition that the profile does not describe.
    """
    site, job = cluster.value, recipe.value.job
    if not isinstance(site, SlurmCluster):
        return cluster
    placement = _placement(site.placement, job)
    _refuse_strangers(recipe, site, job)
    origins, partitions = dict(cluster.origins), {}
    for name, partition in site.partitions.items():
        given = {key: value for key in _CHARGES if (value := getattr(job, key)) is not None}
        partitions[name] = partition.model_copy(update=given)
        origins |= {("partitions", name, key): recipe.origin(("job", key)) for key in given}
    return replace(
        cluster,
        value=site.model_copy(update={"placement": placement, "partitions": partitions}),
        origins=origins,
    )


def unused_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that configure sbatch and that a run does not read, so that they can be reported."""
    read = {name for names in _VARIABLES.values() for name in names}
    return sorted(name for name in environ if name.startswith("SBATCH_") and name not in read)


def _placement(given: PlacementConfig, job: JobConfig) -> PlacementConfig:
    if job.partition is None:
        return given
    if isinstance(job.partition, str):
        return PlacementConfig(default=job.partition)
    kept = dict(given.by_role)
    if "engine" in job.partition:  # also for the two sides of disaggregated engines
        kept = {role: name for role, name in kept.items() if role not in ("prefill", "decode")}
    return PlacementConfig(default=given.default, by_role={**kept, **job.partition})


def _refuse_strangers(recipe: Loaded[Recipe], site: SlurmCluster, job: JobConfig) -> None:
    wanted = job.partition.values() if isinstance(job.partition, dict) else [job.partition] if job.partition else []
    if strange := [name for name in wanted if name not in site.partitions]:
        known = ", ".join(site.partitions)
        what = f"{', '.join(map(repr, strange))} is not a partition of {site.name} ({known})"
        hint = "take one of these, or describe it in the profile: the planner must know its nodes"
        where = recipe.where("job.partition")
        if where.startswith("$"):
            hint = f"unset {where[1:]}, set job.partition, or describe it in the profile"
        raise ConfigError([Finding(where, "job.partition", what, hint)])
