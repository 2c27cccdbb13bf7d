"""``hpcrl shell``: a shell on the node of a role, in its environment."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.completion import complete_roles
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunArgument, RunsRootOption, find


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("shell")(shell)


def shell(
    run: RunArgument,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Command to run in place of a shell.")
    ] = None,
    role: Annotated[
        str,
        typer.Option(
            "--role",
            "-r",
            metavar="ROLE[/REPLICA]",
            help="Role next to which the shell runs.",
            autocompletion=complete_roles,
        ),
    ] = "engine",
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="Node of the replica; its first by default.")
    ] = None,
    root: RunsRootOption = None,
) -> None:
    """Open a shell next to a role of a run: on its node, in its environment and directory.

    The shell uses no GPU; the run continues when it ends. A command after `--` runs in place of the shell:
    `hpcrl shell RUN --role engine/0 -- nvidia-smi`. The environment includes the role's secrets.

    Exit code: that of the shell or command; 2 if the role does not run, or a terminal is missing.
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
        say(f"{wanted.where}; `exit` leaves the shell and does not stop the run", err=True)
    sys.stdout.flush()
    os.execvpe(wanted.argv[0], wanted.argv, dict(wanted.env))
