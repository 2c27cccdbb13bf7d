"""Resolve a user's argument to runs: a run, a directory of runs, or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.runs_root import resolve_runs_root, written_runs_roots
from hpcrl.runs.registry import all_runs, find_run, list_runs, newest_run
from hpcrl.runs.rundir import RunDir

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile


def runs_root(given: str | None, cluster: ClusterProfile | None = None) -> Path:
    """Return the directory of runs: the given one, else ``HPCRL_RUNS_ROOT``, else that of the profile (``local``)."""
    if given is not None:
        return Path(given).expanduser().resolve()
    return resolve_runs_root(None if cluster is None else cluster.paths.runs_root, Path.cwd())


def locate_run(run: str | None, root: str | None) -> RunDir:
    """Return the run that is meant, wherever it is; the newest one where none is named.

    Parameters
    ----------
    run:
        Name, id, number of a job, or directory.
    root:
        Only this directory of runs; None: all that are known.

    Raises
    ------
    RunDirError
        There is none, or there are several of this name.
    """
    if run is None:
        return newest_run(runs_in_sight(root), f"in {runs_root(root)}")
    anywhere, chosen = profile_roots if root is None else None, bool(root or os.environ.get("HPCRL_RUNS_ROOT"))
    return find_run(run, runs_root(root), anywhere, chosen=chosen)


def runs_in_sight(root: str | None) -> list[RunDir]:
    """Return all runs of the user, and others' in the directory of runs, newest first; with ``root`` that alone."""
    return all_runs(runs_root(root), profile_roots) if root is None else list_runs(runs_root(root))


def profile_roots() -> Iterator[Path]:
    """Yield directories of runs: of this directory, and of each cluster profile that can be read."""
    yield runs_root(None)
    yield from written_runs_roots(Path.cwd())
