"""``hpcrl sinks``: give sinks what they lack of a run that has ended."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import json_text, say
from hpcrl.cli.selection import OptionalRunArgument, RunsRootOption, find

sinks_app = typer.Typer(help="Sinks of the metrics of runs.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    sinks_app.command("send")(send_rest)
    app.add_typer(sinks_app, name="sinks")


def send_rest(
    run: OptionalRunArgument = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="Only this one. Repeatable.")] = None,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Give each sink of a run that has ended the steps and evaluations that it lacks, and how the run ended.

    Sinks run on this machine, with `env` and `secrets` of the run's profile. What a sink has is not sent again.

    Exit code: 1 one of them failed.
    """
    from hpcrl.cli.progress import working
    from hpcrl.errors import ExitCode
    from hpcrl.jobplan.role_python import outlet_environment
    from hpcrl.runs.outlets.sending import send_what_lacks

    found = find(run, root)
    with working(f"sending the metrics of {found.name}"):
        results = send_what_lacks(found, outlet_environment(found.cluster()), only=only or ())
    if as_json:
        rows = {each.sink: {"last_step": each.last_step, "steps": each.steps, "error": each.error} for each in results}
        say(json_text({"schema": "hpcrl.sinks-send/1", "sinks": rows}))
    for each in results if not as_json else ():
        say(f"{each.sink}: {each.last_step:,} of {each.steps:,} steps" + (f"; {each.error}" if each.error else ""))
    if any(each.error for each in results):
        raise typer.Exit(ExitCode.FAILED)
