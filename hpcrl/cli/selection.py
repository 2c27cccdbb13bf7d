"""Which run a command is about: the argument, the option, and how both become a run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.runs.rundir import RunDir

__all__ = [
    "OptionalRunArgument",
    "RunArgument",
    "RunsArgument",
    "RunsRootOption",
    "ask_slurm",
    "find",
    "profile_roots",
    "runs_in_sight",
    "runs_root",
]


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs, for shell completion."""
    return [run.name for run in runs_in_sight(ctx.params.get("root")) if run.name.startswith(incomplete)]


_RUN_HELP = "Name of a run, its id, the number of its job, or its directory"
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=f"{_RUN_HELP}.", autocompletion=_complete)]
RunsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Runs, each as for `hpcrl status`.", autocompletion=_complete)
]
OptionalRunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help=f"{_RUN_HELP}; the newest run by default.", autocompletion=_complete),
]
RunsRootOption = Annotated[
    str | None,
    typer.Option(
        "--runs-root",
        metavar="DIRECTORY",
        help="Only this directory of runs. A submit takes HPCRL_RUNS_ROOT by default, else what the profile says.",
    ),
]


def runs_root(option: str | None, cluster: ClusterProfile | None = None) -> Path:
    """See `hpcrl.runs.locate.runs_root`."""
    from hpcrl.runs.locate import runs_root

    return runs_root(option, cluster)


def find(run: str | None, option: str | None) -> RunDir:
    """Return the run that is meant, wherever it is; the newest one where none is named."""
    from hpcrl.runs.locate import locate_run

    ask_slurm()
    return locate_run(run, option)


def runs_in_sight(option: str | None) -> list[RunDir]:
    """See `hpcrl.runs.locate.runs_in_sight`."""
    from hpcrl.runs.locate import runs_in_sight

    return runs_in_sight(option)


def profile_roots() -> Iterator[Path]:
    """See `hpcrl.runs.locate.profile_roots`."""
    from hpcrl.runs.locate import profile_roots

    yield from profile_roots()


def ask_slurm() -> None:
    """Let readers of runs ask Slurm about jobs. A command that only sees local runs never does."""
    from hpcrl.runs.job_facts import use_source
    from hpcrl.slurm.lookup import look_up

    use_source(look_up)
