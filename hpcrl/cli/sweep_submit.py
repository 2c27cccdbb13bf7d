"""``hpcrl submit`` of several runs, or of one that waits: options, and what is printed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.completion import complete_settings
from hpcrl.cli.output import say
from hpcrl.cli.selection import find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcrl.runs.rundir import RunDir
    from hpcrl.sweeps.preparing import PreparedSweep, SweepOptions, SweepRequest

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=@/-]{0,62}")

GridOption = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="KEY=V1,V2",
        help="Sweep: a run for each value; several form a grid. Repeatable.",
        autocompletion=complete_settings,
    ),
]
SampleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sample",
        metavar="KEY=DIST",
        help="With --random: loguniform(LOW,HIGH), uniform, int_uniform or choice(V1,V2). Repeatable.",
    ),
]
RandomOption = Annotated[
    int | None, typer.Option("--random", metavar="N", min=1, help="Sweep: draw N points from --sample.")
]
SampleSeedOption = Annotated[int, typer.Option("--sample-seed", help="Another seed draws other points.")]
SeedsOption = Annotated[
    int, typer.Option("--seeds", metavar="N", min=1, help="Replicates of each setting, with N seeds from the recipe's.")
]
MaxRunningOption = Annotated[
    int | None,
    typer.Option(
        "--max-running",
        metavar="K",
        min=1,
        help="Sweep: maximum number of runs at a time. Default: 1 locally, no limit on Slurm.",
    ),
]
AfterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--after", metavar="RUN", help="Start when this run has completed, failed or been cancelled. Repeatable."
    ),
]


def check_tags(tags: Sequence[str]) -> list[str]:
    """Return tags without repetition (UsageError where one cannot be a tag)."""
    from hpcrl.errors import UsageError

    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise UsageError(
                f"{tag!r} cannot be a tag\n"
                "    hint: letters, digits and any of . _ : = @ / -, at most 63, the first a letter or a digit"
            )
    return list(dict.fromkeys(tags))


def runs_after(after: Sequence[str], root: str | None) -> list[RunDir]:
    """Return the runs of ``--after``."""
    return [find(run, root) for run in after]


def submit_sweep(request: SweepRequest, *, tags: Sequence[str], after: Sequence[RunDir], dry_run: bool) -> None:
    """Prepare all members, make them, and start the first ones or hand them to Slurm."""
    import os
    from pathlib import Path

    from hpcrl.cli.progress import working
    from hpcrl.sweeps.control import start_sweep
    from hpcrl.sweeps.creation import check_sweep_vacant, make_sweep
    from hpcrl.sweeps.preparing import prepare_sweep

    with working("checking whether all members would start"):
        prepared = prepare_sweep(request, environ=os.environ, cwd=Path.cwd())
    if dry_run:
        _show(prepared, request.options)
    for note in prepared.notes:
        say(f"note: {note}", err=True)
    prepared.refuse()
    if dry_run:
        check_sweep_vacant(prepared.sweep)
        say("\nnothing was started or written (--dry-run)", err=True)
        return
    sweep = make_sweep(
        prepared, max_running=request.options.max_running, tags=tags, after=after, from_run=request.from_run
    )
    start_sweep(sweep, lambda text: say(text, err=True))
    count = len(prepared.members)
    say(f"submitted {count} run{'s' if count > 1 else ''} of {sweep.name} in {sweep.root}", err=True)
    say(sweep.name)
    for words in ("status", "cancel", "resume"):
        extra = " --watch" if words == "status" else ""
        say(f"  hpcrl sweep {words} {sweep.name}{extra}", err=True)


def _show(prepared: PreparedSweep, options: SweepOptions) -> None:
    """Print the members, and the plan of the first one."""
    from hpcrl.cli.planning_layout import print_plan
    from hpcrl.runs.views.swept_words import value_words

    for member in prepared.members:
        values = " ".join(f"{key}={value_words(value)}" for key, value in member.values.items())
        say(f"{member.name}  {values}".rstrip())
    limit = options.max_running or (None if prepared.uses_slurm else 1)
    say(f"{len(prepared.members)} runs, {'no limit' if limit is None else f'at most {limit}'} at a time")
    first = prepared.runs[0]
    if first.plan is not None:
        print_plan(first.plan, first.site, commands=True)
