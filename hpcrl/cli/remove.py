"""``hpcrl rm``: remove runs that have ended, with all that they have on disk."""

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
    app.command("rm")(remove)


def remove(
    runs: RunsArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the space it would free; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Remove runs that have ended: checkpoints, weights, rollouts, logs, all of their directories. Asks for each.

    Exit code: 2 a run may be alive, or has pinned checkpoints; it was not changed. The others are removed all the same.
    """
    for_each_run(runs, root, lambda run: _remove(run, dry_run, yes))


def _remove(run: RunDir, dry_run: bool, yes: bool) -> None:
    from hpcrl.submit.removal import disk_use, removable, remove_run

    view = removable(run)
    sizes = disk_use(run)
    say(f"{run.name} ({view.state}) in {run.path} has", err=True)
    for part, size in sizes.items():
        say(f"  {_size(size.bytes):>10}  {size.files:>7,} {'file ' if size.files == 1 else 'files'}  {part}", err=True)
    total = sum(size.bytes for size in sizes.values())
    say(f"  {_size(total):>10}  in all", err=True)
    if dry_run:
        say("nothing was removed (--dry-run)", err=True)
        return
    if not yes:
        confirm(f"remove {run.name}, and free {_size(total)}? It cannot be brought back")
    remove_run(run)
    say(f"removed {run.name}")


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
