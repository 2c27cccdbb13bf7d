"""``hpcrl compare``: runs side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import json_text, say
from hpcrl.cli.selection import RunsArgument, RunsRootOption, find


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare)


def compare(
    runs: RunsArgument,
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

    found = compare_runs([find(run, root) for run in runs], reward=reward, heldout=heldout)
    if as_json:
        say(json_text(msgspec.to_builtins(found)))
        return
    for line in comparison_lines(found):
        say(line)
