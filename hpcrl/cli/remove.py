"""``hpcrl rm``: remove a run that has ended, with all that it has on disk."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.options import confirm
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunArgument, RunsRootOption, find

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("rm")(remove)


def remove(
    run: RunArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would free; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Remove a run that has ended: checkpoints, weights, rollouts, logs, all of its directory. Asks before it does.

    Exit code: 2 the run may be alive, or has pinned checkpoints; nothing was changed.
    """
    from hpcrl.submit.removal import measure, removable, remove_run

    found = find(run, root)
    view = removable(found)
    sizes = measure(found)
    say(f"{found.name} ({view.state}) in {found.path} has", err=True)
    for part, size in sizes.items():
        say(f"  {_size(size.bytes):>10}  {size.files:>7,} {'file ' if size.files == 1 else 'files'}  {part}", err=True)
    total = sum(size.bytes for size in sizes.values())
    say(f"  {_size(total):>10}  in all", err=True)
    if dry_run:
        say("nothing was removed (--dry-run)", err=True)
        return
    if not yes:
        confirm(f"remove {found.name}, and free {_size(total)}? It cannot be brought back")
    remove_run(found)
    say(f"removed {found.name}")


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
