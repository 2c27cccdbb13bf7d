"""``hpcrl weights``: the hand-offs of a run: what there is, whether it is whole, what stays and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import VERSION, JsonOption, confirm
from hpcrl.cli.output import markup, say, table_console
from hpcrl.cli.selection import OptionalRunArgument, RunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir
    from hpcrl.runs.views.stores import StoredItem

weights_app = typer.Typer(help="Weight hand-offs of a run.", no_args_is_help=True)

AllVersionsArgument = Annotated[
    int | None, typer.Argument(metavar="[VERSION]", parser=VERSION, help="Policy version; all by default.")
]
NewestArgument = Annotated[
    int | None, typer.Argument(metavar="[VERSION]", parser=VERSION, help="Policy version; the newest by default.")
]
VersionArgument = Annotated[int, typer.Argument(metavar="VERSION", parser=VERSION, help="Policy version.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(weights_app, name="weights")


@weights_app.command("ls")
def weights_ls(run: OptionalRunArgument = None, as_json: JsonOption = False, root: RunsRootOption = None) -> None:
    """List versions, durable and announced ones."""
    from hpcrl.runs.views.stores import weights_items

    found = find(run, root)
    _print(found, weights_items(found), as_json)


@weights_app.command("show")
def weights_show(
    run: RunArgument, version: NewestArgument = None, as_json: JsonOption = False, root: RunsRootOption = None
) -> None:
    """Show what a version holds, what it is made from, and who holds it."""
    import json

    from rich.filesize import decimal

    from hpcrl.runs.views.handoffs import handoff_document

    shown = handoff_document(find(run, root), version)
    if as_json:
        say(json.dumps(shown, indent=2))
        return
    say(f"version {shown['version']}  {shown['kind']}  by {shown['producer']}\n{shown['path']}")
    if not shown["durable"]:
        served = f"served from memory by {shown['served_by_ranks']} of the trainer's ranks, and lost when they end"
        say(f"{_announced(shown['announced_by'])}: {served}")
    sizes = ", ".join(f"{dtype} {decimal(size)}" for dtype, size in shown["dtypes"].items())
    say(f"{decimal(shown['bytes'])} in {len(shown['files'])} files; {shown['tensors']} tensors: {sizes}")
    if shown["needs"]:
        needs = ", ".join(map(str, shown["needs"]))
        what = "adapts" if shown["kind"] == "lora" else f"changes {shown['changed_tensors']} tensors of"
        say(f"{what} version {shown['parent']}; made from {needs}")
    for label, key in (("needed by", "needed_by"), ("served by", "served_by"), ("leased by", "leased_by")):
        if shown[key]:
            say(f"{label} {', '.join(map(str, shown[key]))}")
    if shown["pin"]:
        say(f"pinned by {shown['pin']['by']}: {shown['pin']['reason']}")


@weights_app.command("verify")
def weights_verify(
    run: RunArgument, version: AllVersionsArgument = None, as_json: JsonOption = False, root: RunsRootOption = None
) -> None:
    """Read every byte and compare with the manifest. Exit code 1 where something is damaged."""
    from hpcrl.runs.views.stores import verify_handoffs

    found = find(run, root)
    _print(found, verify_handoffs(found, version), as_json, verified=True)


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

    from hpcrl.runs.views.stores import weights_difference

    difference = weights_difference(find(run, root), old, new)
    if as_json:
        say(json.dumps(difference, indent=2))
        return
    for sign, key in (("~", "changed"), ("+", "added"), ("-", "removed")):
        for name in difference[key]:
            say(f"{sign} {name}")
    say(
        f"{len(difference['changed'])} of {difference['tensors']} tensors changed: "
        f"{difference['changed_bytes']:,} of {difference['total_bytes']:,} bytes"
    )


@weights_app.command("pin")
def weights_pin(
    run: RunArgument,
    version: VersionArgument,
    reason: Annotated[str, typer.Option("--reason", "-m", help="Reason for keeping it, for people.")],
    root: RunsRootOption = None,
) -> None:
    """Keep a version, and what it is made from, until it is unpinned."""
    from hpcrl.runs.views.handoffs import pin_handoff

    found = find(run, root)
    pin_handoff(found, version, reason)
    say(f"version {version} of {found.name} is pinned", err=True)


@weights_app.command("unpin")
def weights_unpin(run: RunArgument, version: VersionArgument, root: RunsRootOption = None) -> None:
    """Unpin a version; it is removed if nothing else keeps it."""
    from hpcrl.runs.views.handoffs import unpin

    found = find(run, root)
    was = unpin(found, version)
    say(f"version {version} of {found.name} {'is no longer' if was else 'was not'} pinned", err=True)


@weights_app.command("prune")
def weights_prune(
    run: RunArgument,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, help="Newest versions to keep; the recipe's keep_last by default.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Remove versions that are not needed. Shows which, why the others stay, and asks before."""
    import json

    from rich.filesize import decimal

    from hpcrl.errors import UsageError
    from hpcrl.runs.views.handoffs import collector_of, removal_plan, version_bytes

    if as_json and not (dry_run or yes):
        raise UsageError(
            "prune asks before it removes versions, and --json cannot ask\n    hint: add --dry-run or --yes"
        )
    found = find(run, root)
    collector = collector_of(found, keep)
    doomed, kept = removal_plan(collector)
    if not as_json:
        for version, reason in kept.items():
            say(f"keep    {version:6d}  {reason}")
        for version in doomed:
            say(f"remove  {version:6d}")
        if not doomed:
            say("nothing to remove", err=True)
    removed: list[int] = []
    if doomed and not dry_run:
        if not yes:
            size = decimal(version_bytes(found, doomed))
            confirm(f"remove {len(doomed)} versions of {found.name} ({size})?")
        report = collector.collect()
        removed, kept = report.removed, report.kept
        if not as_json:
            say(f"removed {', '.join(map(str, removed)) or 'nothing'}", err=True)
    if as_json:
        document = {"run": found.name, "dry_run": dry_run, "removable": doomed, "removed": removed, "kept": kept}
        say(json.dumps(document, indent=2))


def _print(run: RunDir, items: list[StoredItem], as_json: bool, *, verified: bool = False) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    from hpcrl.errors import ExitCode
    from hpcrl.runs.views.stores import stores_document
    from hpcrl.runs.views.words import age

    if as_json:
        say(stores_document(run, "version", items))
    elif not items:
        say(f"{run.name} has none", err=True)
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("version", "age", "size", "files", "by", "state"):
            table.add_column(column, overflow="fold")
        for item in items:
            old = "?" if item.age_s is None else age(item.age_s)
            good = _announced(item.announced_by) if not item.durable else "whole" if verified else "complete"
            state = markup("[red]{}[/red]", item.problem) if item.problem else good
            table.add_row(str(item.number), old, decimal(item.bytes), str(item.files), item.by, state)
        table_console().print(table)
    if any(item.problem for item in items):
        raise typer.Exit(ExitCode.FAILED)


def _announced(attempt: int | None) -> str:
    """Return the state of a version that is not durable."""
    return "announced, not durable" + ("" if attempt is None else f" (attempt {attempt})")
