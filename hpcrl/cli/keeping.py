"""``hpcrl bundle``, ``share`` and ``gc``: hand a run on, open it to a group, let old ones go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import confirm
from hpcrl.cli.output import say
from hpcrl.cli.output_file import output_file
from hpcrl.cli.selection import OptionalRunArgument, RunArgument, RunsRootOption, ask_slurm, find, runs_in_sight

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir

_MOST_SHOWN = 10
"""Maximum number of secrets that are named."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("bundle")(bundle)
    app.command("share")(share)
    app.command("gc")(collect_runs)


def bundle(
    run: OptionalRunArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", callback=output_file, help="Default: RUN.bundle.tar.gz here."),
    ] = None,
    max_mib: Annotated[
        int, typer.Option("--max-mib", min=1, metavar="MIB", help="Maximum size of its files before compression.")
    ] = 64,
    no_rollouts: Annotated[bool, typer.Option("--no-rollouts", help="Leave samples of rollouts out.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Pack a run into one file: recipe, plan, versions, metrics, page, events, logs, samples of rollouts.

    The file has no weights and no checkpoints. Values that look like secrets, and the run's own secrets, are replaced.
    It contains names of users, hosts and directories, and texts of your data: read it before you publish it.
    """
    from rich.filesize import decimal

    from hpcrl.runs.sharing.run_bundle import write_run_bundle

    found = find(run, root)
    target = output or Path(f"{found.name}.bundle.tar.gz")
    more = {} if no_rollouts else _page_of(found)
    made = write_run_bundle(
        found, target, max_bytes=max_mib << 20, more=more, **({"rollouts": 0} if no_rollouts else {})
    )
    for name, kinds in made.redacted.items():
        say(f"{name}: {', '.join(kinds)} was replaced", err=True)
    if made.left_out:
        say(
            f"{len(made.left_out)} files were left out by --max-mib {max_mib}: {', '.join(made.left_out[:3])} …",
            err=True,
        )
    say(f"{made.files} files, {decimal(made.bytes)}", err=True)
    say(made.path)


def _page_of(run: RunDir) -> dict[str, bytes]:
    """Return the page of a run (``hpcrl report``); nothing, and a line that says why, where it cannot be made."""
    import tempfile

    from hpcrl.errors import HpcrlError, MissingExtraError
    from hpcrl.installing import extra_of

    try:
        from hpcrl.analysis.page.write_html import write_page

        with tempfile.TemporaryDirectory() as directory:
            return {"report.html": write_page([run], Path(directory) / "report.html").read_bytes()}
    except ImportError as error:
        extra = extra_of(error)
        say(f"no page: {error if extra is None else MissingExtraError(extra, error.name or extra)}", err=True)
        return {}
    except (HpcrlError, OSError, ValueError) as error:
        say(f"no page: {error}", err=True)
        return {}


def share(
    run: RunArgument,
    group: Annotated[str | None, typer.Option("--group", metavar="NAME", help="The group. Default: your own.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Close the run to all others again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look for secrets; change nothing.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Let a group read a run: status, logs, curves, rollouts, weights. The run's token stays yours alone.

    It is refused if files of the run contain secrets. Later attempts are shared, too.

    Exit code: 2 files have secrets; nothing was changed.
    """
    import grp
    import itertools
    import os

    from hpcrl.errors import UsageError
    from hpcrl.runs.sharing.group_access import close_to_group, find_leaks, open_to_group

    found = find(run, root)
    if undo:
        say(f"{found.name} is yours alone: {close_to_group(found)} entries were closed")
        return
    named = group or grp.getgrgid(os.getegid()).gr_name
    leaks = list(itertools.islice(find_leaks(found), _MOST_SHOWN))
    if leaks:
        places = "\n".join(f"    {each.path.relative_to(found.path)}:{each.line}: {each.kind}" for each in leaks)
        raise UsageError(f"files of {found.name} have secrets in them; nothing was changed\n{places}")
    if dry_run:
        say(f"{found.name} has no known secrets; nothing was changed (--dry-run)")
        return
    opened = open_to_group(found, named)
    say(f"{found.name} is readable by the group {named}: {opened.entries} entries were opened")
    _say_closed_parents(found)
    if not opened.inherits:
        say("files that an active run writes are opened by the next call: there is no setfacl here", err=True)


def _say_closed_parents(run: RunDir) -> None:
    import stat

    closed = [
        parent for parent in run.path.resolve().parents if not parent.stat().st_mode & (stat.S_IXOTH | stat.S_IXGRP)
    ]
    if closed:
        say(f"others cannot enter {closed[-1]}: open it, too, or the run stays closed", err=True)


def collect_runs(
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="DAYS", min=0.0, help="Days since the end of a run.")
    ] = 30.0,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", metavar="STATE", help="failed, cancelled, lost or completed. Repeatable. Default: not completed."
        ),
    ] = None,
    keep_checkpoints: Annotated[
        int | None,
        typer.Option(
            "--keep-checkpoints", min=1, metavar="N", help="Only remove checkpoints but the newest N of a run."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed; remove nothing.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Remove runs, or checkpoints of runs, that ended long ago: a table first, then it asks.

    Runs that are active, have pinned checkpoints, or belong to other users stay.

    Exit code: 1 some could not be removed.
    """
    from rich.filesize import decimal

    from hpcrl.errors import ExitCode, HpcrlError, UsageError
    from hpcrl.runs.status import RunState
    from hpcrl.submit.collection import CollectionPolicy, collect_run, find_collectable

    ask_slurm()
    names = [each.upper() for each in state or ("failed", "cancelled", "lost")]
    known = {each.value: each for each in RunState if each.ended}
    if wrong := [name.lower() for name in names if name not in known]:
        raise UsageError(f"--state is one of {', '.join(name.lower() for name in known)}, not {wrong[0]!r}")
    policy = CollectionPolicy(older_than, frozenset(known[name] for name in names), keep_checkpoints)
    going, spared = find_collectable(runs_in_sight(root), policy)
    for each in going:
        what = f"{len(each.checkpoints)} checkpoints of " if each.checkpoints else ""
        say(
            f"{decimal(each.bytes):>10}  {each.age_days:6.1f} days  {each.state.lower():<9}  {what}{each.run.path}",
            err=True,
        )
    for stays in spared:
        say(f"stays: {stays.run.path}: {stays.why}", err=True)
    total = decimal(sum(each.bytes for each in going))
    if not going or dry_run:
        say(
            f"nothing was removed ({total} would go)" if going else "nothing was removed: there is nothing to remove",
            err=True,
        )
        return
    if not yes:
        confirm(f"remove these, and free {total}? It cannot be brought back")
    failed = False
    for each in going:
        try:
            collect_run(each)
            say(each.run.name)
        except HpcrlError as error:
            failed = True
            say(f"hpcrl: {error}", err=True)
    if failed:
        raise typer.Exit(ExitCode.FAILED)
