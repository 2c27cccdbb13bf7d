"""``hpcrl cancel``: stop a run."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.options import confirm
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunArgument, RunsRootOption, find

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cancel")(cancel)


def cancel(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Stop a run: its roles are asked in order, then killed. It can be resumed later."""
    import getpass

    from hpcrl.cli.slurm import reach_slurm_of
    from hpcrl.runs.observe import observe
    from hpcrl.submit.submission import cancel as cancel_run

    found = find(run, root)
    reach_slurm_of(found)
    view = observe(found)
    if not yes and not view.state.ended:
        roles = ", ".join(f"{c.role} {c.replica} (pid {c.pid})" for c in view.components if c.pid) or "no role yet"
        say(f"this stops {found.name} ({view.state}): {roles}", err=True)
        confirm("stop it?")
    view = cancel_run(found, user=getpass.getuser())
    say(f"{found.name}: {view.state}")
