"""``hpcrl submit``: start a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.following import FollowOption, InJobOption, follow_or_tell
from hpcrl.cli.options import ClusterOption, RecipeArgument, SetOption
from hpcrl.cli.selection import RunsRootOption, ask_slurm, profile_roots, runs_root

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.load import Loaded
    from hpcrl.config.plan import Plan
    from hpcrl.config.recipe import Recipe

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("submit")(submit)


def submit(
    recipe: RecipeArgument,
    cluster: ClusterOption = "local",
    name: Annotated[str | None, typer.Option("--name", "-n", metavar="RUN", help="Name of the run.")] = None,
    overrides: SetOption = None,
    from_run: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP|@vN]",
            help="Begin with the weights of another run: its newest checkpoint, that of a step, or a full version.",
        ),
    ] = None,
    follow: FollowOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the commands; change nothing.")] = False,
    in_job: InJobOption = False,
    queue_anyway: Annotated[
        bool, typer.Option("--queue-anyway", help="Submit also what Slurm could not start as things are.")
    ] = False,
    root: RunsRootOption = None,
) -> None:
    """Start a run of a recipe.

    Slurm is asked first whether it would ever start the jobs: nodes that can be used, limits of partitions, and what
    `sbatch --test-only` says.

    With --from the start model is what another run has learned, in place of model.path, which must be of the same
    shape where it is there; optimizer, data order and counters begin anew.

    Exit code with --follow: 0 completed, 1 failed, 93 given up without progress, 130 cancelled.
    """
    import os
    import time
    from pathlib import Path

    from hpcrl.cli.planning_layout import print_plan
    from hpcrl.config.joined import load_both
    from hpcrl.config.rules.table import check_rules
    from hpcrl.jobplan import (
        absolute_paths,
        absolute_site_paths,
        check_model,
        check_secrets,
        check_sizes,
        default_run_name,
        make_plan,
        with_model_of,
    )
    from hpcrl.runs.registry import check_name
    from hpcrl.runs.start.origin import START_MODEL, find_source
    from hpcrl.slurm.client import SlurmClient
    from hpcrl.slurm.in_job import find_allocation

    loaded, site = load_both(recipe, cluster, overrides or (), environ=os.environ, in_job=in_job)
    source = None
    if from_run is not None:
        source = find_source(from_run, runs_root(root, site.value), profile_roots if root is None else None)
        loaded = with_model_of(loaded, source.config_dir, named=str(source.origin))
    check_rules(loaded, site)
    check_sizes(loaded, site)
    run_name = check_name(name) if name is not None else default_run_name(loaded.value, time.time())
    resolved = absolute_paths(loaded.value, Path.cwd())
    profile = absolute_site_paths(site.value, Path.cwd())
    run_dir = runs_root(root, profile) / run_name
    if source is not None:
        model = resolved.model.model_copy(update={"path": str(run_dir / START_MODEL)})
        resolved = resolved.model_copy(update={"model": model})
    plan = make_plan(resolved, profile, run_name, run_dir)
    if dry_run:
        print_plan(plan, site, commands=True)
    allocation = find_allocation(plan, os.environ, SlurmClient()) if in_job else None
    _name_unread_variables(plan, in_job=in_job)
    check_secrets(plan, site)
    if loaded.value.job.payload == "roles":
        check_model(loaded, Path(resolved.model.path) if source is None else source.config_dir)
        _check_programs(loaded, site, plan)
    if dry_run:
        typer.echo("\nnothing was started or written (--dry-run)", err=True)
        return

    from hpcrl.submit.new_run import submit_new
    from hpcrl.submit.submission import create_run

    ask_slurm()
    _ask_whether_it_could_start(plan, profile, wanted=not queue_anyway, in_job=in_job)
    provenance = {".".join(map(str, path)): origin for path, origin in loaded.origins.items()}
    if source is not None:
        typer.echo(f"taking the weights of {source.origin}", err=True)
        provenance["model.path"] = f"--from {from_run}"
    made = create_run(resolved, profile, plan, provenance=provenance, source=source)
    submit_new(made, in_job=allocation)
    where = "" if allocation is None else f", inside of job {allocation.job_id}"
    typer.echo(f"submitted {run_name} in {made.run.path}{where}", err=True)
    follow_or_tell(made.run, follow)


def _name_unread_variables(plan: Plan, *, in_job: bool) -> None:
    """Say which variables of the shell sbatch is not told about."""
    import os

    from hpcrl.config.joined import unused_variables

    for variable in () if in_job or plan.layout.kind == "local" else unused_variables(os.environ):
        typer.echo(f"note: {variable} is not read: the plan says what sbatch is told (hpcrl plan)", err=True)


def _ask_whether_it_could_start(plan: Plan, profile: ClusterProfile, *, wanted: bool, in_job: bool) -> None:
    """Refuse what Slurm could not start (UsageError with the reasons), where that is wanted. It must answer."""
    from hpcrl.cli.slurm import reachable_slurm
    from hpcrl.config.cluster import SlurmCluster
    from hpcrl.slurm.admission import check_admission

    if isinstance(profile, SlurmCluster) and plan.layout.components and not in_job:
        client = reachable_slurm()
        if wanted:
            check_admission(plan, profile, client)


def _check_programs(recipe: Loaded[Recipe], site: Loaded[ClusterProfile], plan: Plan) -> None:
    """Check what roles will execute: interpreters, environments of the user's own, the router, flags of engines."""
    from hpcrl.cli.progress import working
    from hpcrl.jobplan import check_engine_flags, check_packages, check_pythons
    from hpcrl.jobplan.environment_trial import check_environments
    from hpcrl.jobplan.packages import check_compiler

    check_pythons(plan, site)
    with working("trying the recipe's environments"):
        tried = check_environments(recipe, plan, site.value)
    notes = [*tried, *check_packages(recipe, plan), *check_compiler(recipe, plan, site.value)]
    for note in [*notes, *check_engine_flags(recipe, plan)]:
        typer.echo(f"note: {note}", err=True)
