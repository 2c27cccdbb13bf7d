"""``hpcrl shell``: a shell on the node of a role, in its environment."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.completion import complete_roles
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunArgument, RunsRootOption, find

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("shell")(shell)


def shell(
    run: RunArgument,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Run this in place of a shell.")
    ] = None,
    role: Annotated[
        str,
        typer.Option(
            "--role", "-r", metavar="ROLE[/REPLICA]", help="Beside which role.", autocompletion=complete_roles
        ),
    ] = "engine",
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="Which of the replica's nodes; the first by default.")
    ] = None,
    root: RunsRootOption = None,
) -> None:
    """Open a shell beside a role of a run: on its node, in its environment and directory.

    It takes no GPU away and ends with you; the run goes on. After `--` comes a command in place of the shell:
    `hpcrl shell RUN --role engine/0 -- nvidia-smi`. What it is started with includes the role's secrets.

    Exit code: that of the shell or command; 2 where the role does not run, or there is no terminal.
    """
    import os
    import sys

    from hpcrl.cli.slurm import reach_slurm_of
    from hpcrl.submit.shell import shell_in

    found = find(run, root)
    reach_slurm_of(found)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    wanted = shell_in(found, role, node=node, command=command or (), terminal=terminal)
    if not command:
        say(f"{wanted.where}; exit leaves it, and the run goes on", err=True)
    sys.stdout.flush()
    os.execvpe(wanted.argv[0], wanted.argv, dict(wanted.env))
