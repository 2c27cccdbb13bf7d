"""``hpcrl sft``: start a supervised run."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.following import FollowOption, InJobOption, NewNameOption, QueueAnywayOption
from hpcrl.cli.options import ClusterOption, RecipeArgument, SetOption
from hpcrl.cli.selection import RunsRootOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sft")(sft)


def sft(
    recipe: RecipeArgument,
    cluster: ClusterOption = "local",
    name: NewNameOption = None,
    overrides: SetOption = None,
    from_run: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN[@STEP|@vN]", help="Start with the weights of another run, as submit does."),
    ] = None,
    follow: FollowOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read the data, show the plan and the commands; change nothing.")
    ] = False,
    in_job: InJobOption = False,
    queue_anyway: QueueAnywayOption = False,
    root: RunsRootOption = None,
) -> None:
    """Start supervised training on conversations: a run of a recipe with a section `sft`.

    The run has a trainer alone. `status`, `logs`, `why`, `resume` and `cancel` work as for other runs; its last version
    in weights/ is a model directory that `model.path` of another recipe can name, and `--from RUN` begins with its
    newest checkpoint.

    Exit code with --follow: 0 completed, 1 failed, 93 given up without progress, 130 cancelled.
    """
    from hpcrl.cli.submit import submit
    from hpcrl.config.load import load_recipe
    from hpcrl.errors import UsageError

    loaded = load_recipe(recipe, overrides or ())
    if loaded.value.sft is None:
        raise UsageError(
            f"{loaded.source} has no section sft, which names the conversations\n"
            "    hint: add sft with data: FILE (docs/sft.md), or start a run with rollouts: hpcrl submit"
        )
    submit(
        recipe,
        cluster=cluster,
        name=name,
        overrides=overrides,
        from_run=from_run,
        follow=follow,
        dry_run=dry_run,
        in_job=in_job,
        queue_anyway=queue_anyway,
        root=root,
    )
