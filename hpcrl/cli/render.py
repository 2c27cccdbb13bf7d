"""``hpcrl render``: the scripts that a submit would hand to Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.options import ClusterOption, RecipeArgument, SetOption
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunsRootOption, runs_root

TemplatesOption = Annotated[
    Path | None,
    typer.Option(
        "--templates", metavar="DIR", help="Directory of your own sbatch templates; missing ones come from hpcrl."
    ),
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
    root: RunsRootOption = None,
) -> None:
    """Write the sbatch scripts of a recipe on a Slurm site, and plan.json. Submits nothing.

    They are what a submit under the same --name sends, byte for byte, but for the run id: that is random, and zeros
    stand for it here. The batch process finds its run only where a submit has made the run directory.
    """
    import os

    from hpcrl.cli.planning_inputs import say_refusals
    from hpcrl.config.cluster import SlurmCluster
    from hpcrl.errors import UsageError
    from hpcrl.slurm.scripts import STAND_IN_ID, run_scripts
    from hpcrl.storage.files import atomic_write
    from hpcrl.submit.prepare import prepare

    prepared = prepare(
        recipe,
        cluster,
        overrides or (),
        environ=os.environ,
        cwd=Path.cwd(),
        name=(lambda loaded: loaded.name) if name is None else name,
        root=lambda profile: runs_root(root, profile),
        programs=False,
    )
    if prepared.plan is None:
        prepared.refuse()
    say_refusals(prepared)
    plan, profile = prepared.outlined(), prepared.profile
    if not isinstance(profile, SlurmCluster):
        raise UsageError(f"{profile.name} is not a Slurm site: there is no script to render (give one with --cluster)")
    scripts = run_scripts(plan, profile, run_id=STAND_IN_ID, templates=templates)
    directory.mkdir(parents=True, exist_ok=True)
    files = {"plan.json": plan.model_dump_json(indent=2) + "\n"}
    files |= {script.file_name: script.text for script in scripts}
    for file_name, text in files.items():
        atomic_write(directory / file_name, text.encode())
        say(directory / file_name)
