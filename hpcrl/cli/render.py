"""``hpcrl render``: the scripts that a submit would hand to Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.options import ClusterOption, RecipeArgument, SetOption

__all__ = ["TemplatesOption", "register"]

TemplatesOption = Annotated[
    Path | None,
    typer.Option("--templates", metavar="DIR", help="Your own sbatch templates; those it lacks come from hpcrl."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("render")(render)


def render(
    recipe: RecipeArgument,
    directory: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory to write into.")],
    cluster: ClusterOption = "local",
    overrides: SetOption = None,
    name: Annotated[str | None, typer.Option("--name", "-n", metavar="RUN", help="Name of the run.")] = None,
    templates: TemplatesOption = None,
) -> None:
    """Write the sbatch scripts of a recipe on a Slurm site, and plan.json. Submits nothing.

    The run id in the scripts is a stand-in: a submit renders them again with its own.
    """
    import os

    from hpcrl.config.cluster import SlurmCluster
    from hpcrl.config.joined import load_both
    from hpcrl.config.rules import check_rules
    from hpcrl.errors import UsageError
    from hpcrl.fs import atomic_write
    from hpcrl.planning import absolute_paths, absolute_site_paths, make_plan, resolve_runs_root
    from hpcrl.runs.registry import check_name
    from hpcrl.slurm.render import render_jobs
    from hpcrl.slurm.slurm_executor import batch_process

    loaded, site = load_both(recipe, cluster, overrides or (), environ=os.environ)
    check_rules(loaded, site)
    cwd = Path.cwd()
    profile = absolute_site_paths(site.value, cwd)
    if not isinstance(profile, SlurmCluster):
        raise UsageError(f"{profile.name} is no Slurm site: there is no script to render (give one with --cluster)")
    run_name = loaded.value.name if name is None else check_name(name)
    plan = make_plan(absolute_paths(loaded.value, cwd), profile, run_name, resolve_runs_root(profile, cwd) / run_name)
    scripts = render_jobs(
        plan,
        profile,
        run_id=f"{run_name}-rendered",
        # what submitit puts into the job; the folder is written by a submit
        command=lambda part: batch_process(plan.run_dir / "submitit"),
        cwd=cwd,
        templates=templates,
    )
    directory.mkdir(parents=True, exist_ok=True)
    files = {"plan.json": plan.model_dump_json(indent=2) + "\n"}
    files |= {script.file_name: script.text for script in scripts}
    for file_name, text in files.items():
        atomic_write(directory / file_name, text.encode())
        typer.echo(directory / file_name)
