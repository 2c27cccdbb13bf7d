"""Which run a command is about: the argument, the option, and how both become a run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.runs.rundir import RunDir

__all__ = ["OptionalRunArgument", "RunArgument", "RunsRootOption", "ask_slurm", "find", "runs_root"]


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs, for shell completion."""
    from hpcrl.runs.registry import list_runs

    return [run.name for run in list_runs(runs_root(ctx.params.get("root"))) if run.name.startswith(incomplete)]


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, or its directory.", autocompletion=_complete)
]
OptionalRunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="Name of a run, or its directory; the newest run by default.", autocompletion=_complete
    ),
]
RunsRootOption = Annotated[
    str | None,
    typer.Option(
        "--runs-root",
        metavar="DIRECTORY",
        help="Directory of runs. Default: HPCRL_RUNS_ROOT, else what the cluster profile says.",
    ),
]


def runs_root(option: str | None, cluster: ClusterProfile | None = None) -> Path:
    """Where runs are: the option, else ``HPCRL_RUNS_ROOT``, else the cluster profile (``local`` by default)."""
    from pathlib import Path

    from hpcrl.config.load import load_cluster
    from hpcrl.jobplan import resolve_runs_root

    if option is not None:
        return Path(option).expanduser().resolve()
    return resolve_runs_root(cluster if cluster is not None else load_cluster("local").value, Path.cwd())


def find(run: str | None, option: str | None) -> RunDir:
    """The run that is meant; the newest one where none is named."""
    from hpcrl.runs.registry import find_run, newest_run

    ask_slurm()
    root = runs_root(option)
    return newest_run(root) if run is None else find_run(run, root)


def ask_slurm() -> None:
    """Let readers of runs ask Slurm about jobs. A command that only sees local runs never does."""
    from hpcrl.runs.jobs import use_source
    from hpcrl.slurm.lookup import look_up

    use_source(look_up)
