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
    """Where runs are: the option, else ``HPCRL_RUNS_ROOT``, else the cluster profile (``local`` by default)."""
    from pathlib import Path

    from hpcrl.config.runs_root import resolve_runs_root

    if option is not None:
        return Path(option).expanduser().resolve()
    return resolve_runs_root(None if cluster is None else cluster.paths.runs_root, Path.cwd())


def find(run: str | None, option: str | None) -> RunDir:
    """The run that is meant, wherever it is; the newest one where none is named."""
    import os

    from hpcrl.runs.registry import find_run, newest_run

    ask_slurm()
    if run is None:
        return newest_run(runs_in_sight(option), f"in {runs_root(option)}")
    anywhere, chosen = profile_roots if option is None else None, bool(option or os.environ.get("HPCRL_RUNS_ROOT"))
    return find_run(run, runs_root(option), anywhere, chosen=chosen)


def runs_in_sight(option: str | None) -> list[RunDir]:
    """All runs of the user, and those of others in the directory of runs, newest first; with the option that alone."""
    from hpcrl.runs.registry import all_runs, list_runs

    root = runs_root(option)
    return all_runs(root, profile_roots) if option is None else list_runs(root)


def profile_roots() -> Iterator[Path]:
    """Where runs are: of this directory, and of each cluster profile that can be read."""
    from pathlib import Path

    from hpcrl.config.runs_root import written_runs_roots

    yield runs_root(None)
    yield from written_runs_roots(Path.cwd())


def ask_slurm() -> None:
    """Let readers of runs ask Slurm about jobs. A command that only sees local runs never does."""
    from hpcrl.runs.job_facts import use_source
    from hpcrl.slurm.lookup import look_up

    use_source(look_up)
