"""``hpcrl compare``: runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import json_text, say
from hpcrl.cli.selection import RunsRootOption, TaggedRunsArgument, find, runs_in_sight

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare)


def compare(
    runs: TaggedRunsArgument = None,
    tags: Annotated[
        list[str] | None,
        typer.Option(
            "--tag",
            metavar="WORD",
            help="Also the runs with this tag, such as the name of a sweep, oldest first. Repeatable: with all tags.",
        ),
    ] = None,
    reward: Annotated[
        float | None,
        typer.Option(
            "--reward", metavar="REWARD", help="Compare the cost of this held-out reward. Default: the highest of all."
        ),
    ] = None,
    heldout: Annotated[
        str | None,
        typer.Option("--heldout", metavar="SET", help="Compare a set of evaluation.sets, not the held-out prompts."),
    ] = None,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Compare runs: settings that differ, held-out reward at equal cost, time to a reward, drops and faults.

    Each difference of held-out rewards comes with its interval, and whether it is more than noise. Runs that differ in
    their seed alone are one side; two or more of them tell the spread between seeds.
    """
    import msgspec

    from hpcrl.analysis.comparison.compared import compare_runs
    from hpcrl.analysis.comparison.comparison_table import comparison_lines
    from hpcrl.errors import UsageError
    from hpcrl.runs.views.listing import rows_of_runs

    def left_out(run: RunDir, why: str) -> None:
        say(f"{run.name} is left out: {why}", err=True)

    chosen = [find(run, root) for run in runs or ()]
    if tags:
        tagged = list(rows_of_runs(runs_in_sight(root), tags=tags, left_out=left_out))
        if not tagged:
            raise UsageError(f"no run has the tag {' and '.join(tags)}\n    hint: hpcrl ls --json shows tags")
        # by creation, which a resume leaves as it is: the first one is what the others are compared with
        chosen += [run for run, row in sorted(tagged, key=lambda each: each[1].created_at_s)]
    found = compare_runs(chosen, reward=reward, heldout=heldout)
    if as_json:
        say(json_text(msgspec.to_builtins(found)))
        return
    for line in comparison_lines(found):
        say(line)
