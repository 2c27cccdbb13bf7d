"""Where runs lie. Every command that looks for a run asks, so profiles are read here without checking all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hpcrl.config.extends import with_bases
from hpcrl.config.resources import find_cluster, find_cluster_below, list_clusters
from hpcrl.errors import ConfigError

__all__ = ["absolute_path", "resolve_runs_root", "written_runs_roots"]


def absolute_path(path: str, cwd: Path) -> Path:
    """``path`` as an absolute one: ``~`` and ``$NAME`` are expanded, relative ones begin at ``cwd``."""
    return (cwd / Path(os.path.expandvars(path)).expanduser()).resolve()


def resolve_runs_root(given: str | None, cwd: Path) -> Path:
    """The runs root as an absolute path: ``HPCRL_RUNS_ROOT``, else what a profile says.

    Parameters
    ----------
    given:
        ``paths.runs_root`` of a profile; None: that of ``local``.

    Raises
    ------
    ConfigError
        It is that of ``local``, and no such profile can be read.
    """
    if chosen := os.environ.get("HPCRL_RUNS_ROOT"):
        return absolute_path(chosen, cwd)
    return absolute_path(given if given is not None else _written(find_cluster("local")), cwd)


def written_runs_roots(cwd: Path) -> Iterator[Path]:
    """What the profiles themselves say, as absolute paths; one that cannot be read says nothing."""
    for path in list_clusters().values():
        try:
            root = _written(path)
        except ConfigError:
            continue  # `hpcrl cluster list` names it
        yield absolute_path(root, cwd)


def _written(profile: Path) -> str:
    tree, _ = with_bases(profile, "cluster profile", find_cluster_below)
    paths = tree.get("paths")
    root = paths.get("runs_root") if isinstance(paths, dict) else None
    if not isinstance(root, str):
        # the whole profile is checked for the sake of its message
        from hpcrl.config.load import load_cluster  # noqa: PLC0415 - the schemas are slow to load

        return load_cluster(str(profile)).value.paths.runs_root
    return root
