"""``hpcrl mcp``: a server for coding agents."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.output import say


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("mcp")(serve)


def serve(
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            help="Also have tools that submit, resume and cancel runs, and that run what a recipe names to check it.",
        ),
    ] = False,
    skill: Annotated[
        bool, typer.Option("--skill", help="Print the skill file for coding agents, and start no server.")
    ] = False,
) -> None:
    """Serve runs, plans and recipes to a coding agent (Model Context Protocol on standard input and output).

    An agent starts this command itself. The tools change nothing unless the server has --allow-changes.
    """
    from hpcrl.errors import MissingExtraError
    from hpcrl.installing import extra_of

    if skill:
        from hpcrl.mcp_server.skill import skill_text

        say(skill_text(), nl=False)
        return
    try:
        from hpcrl.mcp_server.server import make_server
    except ImportError as error:
        if (extra := extra_of(error)) is None:
            raise
        raise MissingExtraError(extra, error.name or extra) from error
    make_server(allow_changes=allow_changes).run("stdio")
