"""``hpcrl weights`` and ``hpcrl checkpoint``: what a run has on disk, and whether it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import JsonOption
from hpcrl.cli.selection import RunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir
    from hpcrl.runs.stores import StoredItem

__all__ = ["register"]

weights_app = typer.Typer(help="Weight hand-offs of a run.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Joint checkpoints of a run.", no_args_is_help=True)

VersionArgument = Annotated[int | None, typer.Argument(metavar="[VERSION]", help="Policy version; all by default.")]
StepArgument = Annotated[int | None, typer.Argument(metavar="[STEP]", help="Step; all by default.")]


def register(app: typer.Typer) -> None:
    """Add the command groups."""
    app.add_typer(weights_app, name="weights")
    app.add_typer(checkpoint_app, name="checkpoint")


@weights_app.command("ls")
def weights_ls(run: RunArgument, as_json: JsonOption = False, root: RunsRootOption = None) -> None:
    """List published versions."""
    from hpcrl.runs.stores import weights_items

    found = find(run, root)
    _print(found, "version", weights_items(found), as_json)


@weights_app.command("verify")
def weights_verify(
    run: RunArgument, version: VersionArgument = None, as_json: JsonOption = False, root: RunsRootOption = None
) -> None:
    """Read every byte and compare with the manifest. Exit code 1 where something is damaged."""
    from hpcrl.runs.stores import verify_handoffs

    found = find(run, root)
    _print(found, "version", verify_handoffs(found, version), as_json, verified=True)


@weights_app.command("diff")
def weights_diff(
    run: RunArgument,
    old: Annotated[int, typer.Argument(metavar="OLD", help="Policy version.")],
    new: Annotated[int, typer.Argument(metavar="NEW", help="Policy version.")],
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Show which tensors changed between two versions."""
    import json

    from hpcrl.runs.stores import weights_difference

    difference = weights_difference(find(run, root), old, new)
    if as_json:
        typer.echo(json.dumps(difference, indent=2))
        return
    for sign, key in (("~", "changed"), ("+", "added"), ("-", "removed")):
        for name in difference[key]:
            typer.echo(f"{sign} {name}")
    typer.echo(
        f"{len(difference['changed'])} of {difference['tensors']} tensors changed: "
        f"{difference['changed_bytes']:,} of {difference['total_bytes']:,} bytes"
    )


@checkpoint_app.command("ls")
def checkpoint_ls(run: RunArgument, as_json: JsonOption = False, root: RunsRootOption = None) -> None:
    """List checkpoints."""
    from hpcrl.runs.stores import checkpoint_items

    found = find(run, root)
    _print(found, "step", checkpoint_items(found), as_json)


@checkpoint_app.command("verify")
def checkpoint_verify(
    run: RunArgument, step: StepArgument = None, as_json: JsonOption = False, root: RunsRootOption = None
) -> None:
    """Read every byte and compare with the manifest. Exit code 1 where something is damaged."""
    from hpcrl.runs.stores import verify_checkpoints

    found = find(run, root)
    _print(found, "step", verify_checkpoints(found, step), as_json, verified=True)


def _print(run: RunDir, kind: str, items: list[StoredItem], as_json: bool, *, verified: bool = False) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    from hpcrl.cli.output import table_console
    from hpcrl.errors import ExitCode
    from hpcrl.runs.stores import items_document

    if as_json:
        typer.echo(items_document(run, kind, items))
    elif not items:
        typer.echo(f"{run.name} has none", err=True)
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in (kind, "age", "size", "files", "by", "state"):
            table.add_column(column, overflow="fold")
        for item in items:
            age = "?" if item.age_s is None else f"{item.age_s:,.0f} s"
            state = f"[red]{item.problem}[/red]" if item.problem else "whole" if verified else "complete"
            table.add_row(str(item.number), age, decimal(item.bytes), str(item.files), item.by, state)
        table_console().print(table)
    if any(item.problem for item in items):
        raise typer.Exit(ExitCode.FAILED)
