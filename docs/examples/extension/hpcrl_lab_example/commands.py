"""A command: ``hpcrl best-step RUN_DIRECTORY``."""

from pathlib import Path
from typing import Annotated

import typer


def best_step(directory: Annotated[Path, typer.Argument(help="Directory of the run.")]) -> None:
    """Print the step with the best mean reward."""
    # inside, so that the list of all commands stays fast
    from hpcrl.runs.metrics import read_metrics
    from hpcrl.runs.rundir import RunDir

    records = read_metrics(RunDir(directory))
    if not records:
        typer.echo(f"{directory} has no steps yet", err=True)
        raise typer.Exit(1)
    best = max(records, key=lambda record: record.reward_mean)
    typer.echo(f"step {best.step}: reward {best.reward_mean:.3f}")
