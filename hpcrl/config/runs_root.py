"""Directory of runs. Every command that looks for a run uses it, so profiles are read here without full validation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hpcrl.config.extends import with_bases
from hpcrl.config.resources import find_cluster, find_cluster_below, list_clusters
from hpcrl.errors import ConfigError


def absolute_path(path: str, cwd: Path) -> Path:
    """Return ``path`` as an absolute one: ``~`` and ``$NAME`` are expanded, relative ones begin at ``cwd``."""
    return (cwd / Path(os.path.expandvars(path)).expanduser()).resolve()


def resolve_runs_root(given: str | None, cwd: Path) -> Path:
    """Return the runs root as an absolute path: ``HPCRL_RUNS_ROOT``, else the profile's.

    Parameters
    ----------
    given:
        ``paths.runs_root`` of a profile; None: that of ``local``.

    Raises
    ------
    ConfigError
        The runs root is that of ``local``, and this profile cannot be read.
    """
    if chosen := os.environ.get("HPCRL_RUNS_ROOT"):
        return absolute_path(chosen, cwd)
    return absolute_path(given if given is not None else _written(find_cluster("local")), cwd)


def written_runs_roots(cwd: Path) -> Iterator[Path]:
    """Yield the runs roots that the profiles set, as absolute paths; a profile that cannot be read is skipped."""
    for path in list_clusters().values():
        try:
            root = _written(path)
        except ConfigError:
            continue  # `hpcrl cluster ls` names it
        yield absolute_path(root, cwd)


def _written(profile: Path) -> str:
    tree, _ = with_bases(profile, "cluster profile", find_cluster_below)
    paths = tree.get("paths")
    root = paths.get("runs_root") if isinstance(paths, dict) else None
    if not isinstance(root, str):
        # the whole profile is validated for its error message
        from hpcrl.config.load import load_cluster  # noqa: PLC0415 - the schemas are slow to load

        return load_cluster(str(profile)).value.paths.runs_root
    return root
