"""Selection of the run of a command: the argument, the option, and the run directory that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.runs.rundir import RunDir


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of runs, for shell completion."""
    return [run.name for run in runs_in_sight(ctx.params.get("root")) if run.name.startswith(incomplete)]


_RUN_HELP = "Name of a run, its id, the number of its job, or its directory"
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=f"{_RUN_HELP}.", autocompletion=_complete)]
RunsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Runs, each as for `hpcrl status`.", autocompletion=_complete)
]
TaggedRunsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN...]", help="Runs, each as for `hpcrl status`.", autocompletion=_complete),
]
OptionalRunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help=f"{_RUN_HELP}; the newest run by default.", autocompletion=_complete),
]
OptionalRunsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN...]", help=f"{_RUN_HELP}; the newest run by default.", autocompletion=_complete),
]
RunsRootOption = Annotated[
    str | None,
    typer.Option(
        "--runs-root",
        metavar="DIRECTORY",
        help="Use only this directory of runs. `submit` defaults to HPCRL_RUNS_ROOT, then to the profile.",
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


def for_each_run(runs: Sequence[str | None], option: str | None, act: Callable[[RunDir], None]) -> None:
    """Call ``act`` with each run that is meant. The error of one run does not stop the others.

    Raises
    ------
    HpcrlError
        The error of the run, where only one is named.
    typer.Exit
        With several runs, the exit code of the first that failed. Each error was printed when it occurred.
    """
    from hpcrl.errors import ExitCode, HpcrlError

    named = list(dict.fromkeys(runs))
    if len(named) == 1:
        act(find(named[0], option))
        return
    codes = []
    for run in named:
        try:
            act(find(run, option))
        except HpcrlError as error:
            say(f"hpcrl: {error}", err=True)
            codes.append(int(error.exit_code))
        except typer.Exit as end:
            codes.append(end.exit_code)
    raise typer.Exit(next((code for code in codes if code), int(ExitCode.OK)))


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
    from hpcrl.runs.job_facts import set_job_query
    from hpcrl.slurm.lookup import look_up

    set_job_query(look_up)
