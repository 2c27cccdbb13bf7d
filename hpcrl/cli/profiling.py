"""``hpcrl profile``: record what a role of a run does now."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.completion import complete_roles
from hpcrl.cli.output import say
from hpcrl.cli.output_file import output_file
from hpcrl.cli.selection import OptionalRunArgument, RunsRootOption, find


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("profile")(profile)


def profile(
    run: OptionalRunArgument = None,
    role: Annotated[
        str,
        typer.Option("--role", "-r", metavar="ROLE[/REPLICA]", help="Role to profile.", autocompletion=complete_roles),
    ] = "trainer",
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Rank of the trainer; 0 by default.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="Number of the trainer's steps; 2 by default.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Record allocations as well; on CUDA also a snapshot of the allocator.")
    ] = False,
    seconds: Annotated[
        int | None,
        typer.Option("--seconds", metavar="N", min=1, help="Sample stacks with py-spy for so long; 10 by default."),
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Print the stacks of now, by py-spy.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            callback=output_file,
            help="Copy of the trace, compressed where it ends in .gz.",
        ),
    ] = None,
    most_mb: Annotated[
        int, typer.Option("--max-mb", min=1, help="Maximum size of a trace before it is compressed, in MB.")
    ] = 1000,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=1.0, help="Maximum wait for the steps."),
    ] = None,
    root: RunsRootOption = None,
) -> None:
    """Record what a role of a run does, while it runs: steps of a trainer's rank, or the stacks of any role.

    Steps are recorded by torch's profiler, between the end of the current one and that of the last one asked for;
    Ctrl-C withdraws the request. Other roles, and ranks with `--seconds` or `--stacks`, are sampled by py-spy on their
    node. Traces open in https://ui.perfetto.dev. They stay in the run directory, in `attempts/NNNN/profiles`.
    """
    from pathlib import Path

    from hpcrl.cli.slurm import reach_slurm_of
    from hpcrl.errors import UsageError
    from hpcrl.submit.role_profile import StepProfileOptions, copy_trace, profile_steps, spy_on_role

    by_steps = role.split("/")[0] == "trainer" and seconds is None and not stacks
    if not by_steps and (steps is not None or memory or timeout is not None):
        raise UsageError("--steps, --memory and --timeout are for the trainer, without --seconds and --stacks")
    if stacks and (seconds is not None or output is not None):
        raise UsageError("--stacks takes the stacks once and prints them: it goes with neither --seconds nor --output")
    found = find(run, root)
    reach_slurm_of(found)
    if by_steps:
        wanted = StepProfileOptions(rank or 0, 2 if steps is None else steps, memory, most_mb * 1_000_000, timeout)
        made = profile_steps(found, wanted, role=role, on_wait=lambda words: say(words, err=True))
    else:
        made = spy_on_role(found, role, seconds=0 if stacks else seconds or 10, rank=rank)
    for note in made.notes:
        say(note, err=True)
    if stacks:
        say(made.files[0].read_text(errors="replace"))
        say(f"{made.words}: {made.files[0]}", err=True)
        return
    if output is not None:
        copy_trace(made.files[0], Path(output))
    for path in made.files:
        say(f"{path}: {made.words}, {path.stat().st_size / 1e6:.1f} MB")
