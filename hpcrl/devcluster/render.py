"""Configuration files of a virtual cluster, from the templates in ``templates/devcluster``."""

from __future__ import annotations

import getpass
from pathlib import Path

import jinja2

from hpcrl.config.resources import package_data
from hpcrl.devcluster.place import ClusterPaths
from hpcrl.devcluster.settings import Record

_CGROUP_SINCE = (23, 2)
"""From this version on slurmd reads cgroup.conf whatever plugins are chosen, and the file may say no to cgroups."""


def render_configuration(record: Record, paths: ClusterPaths, *, user: str) -> dict[str, str]:
    """Return the contents by file name. Pure.

    Parameters
    ----------
    user:
        Whom the daemons run as.
    """
    names = ["slurm.conf", "gres.conf"]
    if record.slurm_version >= _CGROUP_SINCE:
        names.append("cgroup.conf")
    if record.settings.accounting:
        names += ["slurmdbd.conf", "mariadb.cnf"]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(package_data("templates") / "devcluster"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    values = {"settings": record.settings, "ports": record.ports, "nodes": record.nodes, "paths": paths, "user": user}
    values["slurm_version"] = record.slurm_version
    return {name: environment.get_template(f"{name}.j2").render(values) for name in names}


def write_configuration(record: Record, paths: ClusterPaths) -> None:
    """Write all files into ``etc/``."""
    for name, text in render_configuration(record, paths, user=getpass.getuser()).items():
        path: Path = paths.etc / name
        path.touch(mode=0o600)  # slurmdbd refuses a file that others may read
        path.write_text(text)
