"""``hpcrl cancel``: stop runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import confirm
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunsArgument, RunsRootOption, for_each_run

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cancel")(cancel)


def cancel(
    runs: RunsArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Stop runs: their roles are asked in order, then killed. They can be resumed later.

    Exit code: 0 all were stopped; else that of the first that was not. The others are stopped all the same.
    """
    for_each_run(runs, root, lambda run: _cancel(run, yes))


def _cancel(run: RunDir, yes: bool) -> None:
    import getpass

    from hpcrl.cli.slurm import reach_slurm_of
    from hpcrl.runs.observe import observe
    from hpcrl.submit.submission import cancel as cancel_run

    reach_slurm_of(run)
    view = observe(run)
    if not yes and not view.state.ended:
        roles = ", ".join(f"{c.role} {c.replica} (pid {c.pid})" for c in view.components if c.pid) or "no role yet"
        say(f"this stops {run.name} ({view.state}): {roles}", err=True)
        confirm("stop it?")
    view = cancel_run(run, user=getpass.getuser())
    say(f"{run.name}: {view.state}")
