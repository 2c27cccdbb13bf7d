"""``hpcrl requeue``: save, and go on in the next attempt."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.options import confirm
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunArgument, RunsRootOption, find


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("requeue")(requeue)


def requeue(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Save a checkpoint, give the nodes back, and let Slurm start the next attempt.

    For maintenance of nodes, or to make room. The run keeps its job id and continues by itself.
    """
    from hpcrl.cli.slurm import reach_slurm_of
    from hpcrl.errors import ExitCode
    from hpcrl.submit.requeue import check_requeue
    from hpcrl.submit.requeue import requeue as requeue_run

    found = find(run, root)
    reach_slurm_of(found)
    view = check_requeue(found)
    if not yes:
        nodes = "" if view.job is None else f" on {len(view.job.nodes)} nodes"
        say(f"this ends attempt {view.attempt} of {found.name}{nodes} after a save", err=True)
        confirm("requeue it?")
    view = requeue_run(found)
    say(f"{found.name}: {view.state}")
    if view.state.ended:  # it ended before it received the request
        raise typer.Exit(ExitCode.OK if view.state == "COMPLETED" else ExitCode.FAILED)
