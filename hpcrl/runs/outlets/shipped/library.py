"""Import the library of a sink, and read files of the run that sinks hand on."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Any

from hpcrl.config.plan import Plan
from hpcrl.errors import HpcrlError
from hpcrl.extend import ExtensionError
from hpcrl.runs.outlets.interface import RunInfo
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.snapshot import read_snapshot


def import_library(module: str, package: str) -> Any:
    """Import a module of an optional library.

    Parameters
    ----------
    package:
        Its name on the package index, for the hint.

    Raises
    ------
    ExtensionError
        The interpreter does not have it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtensionError(
            f"{sys.executable} cannot import {module}: {error}",
            f"{sys.executable} -m pip install {package}, or name another interpreter in `python` of the sink",
        ) from error


def run_config(run: RunInfo) -> dict[str, Any]:
    """Return what a sink stores as the configuration of a run; what cannot be read is left out.

    The keys are ``recipe`` (as resolved), ``cluster``, ``nodes``, ``gpus``, ``plan`` (layout and groups of roles);
    ``hpcrl_version``, ``git_commit``, ``user``, ``command`` and ``provenance`` of its record; ``hpcrl`` (commit,
    uncommitted changes and their hash) and ``packages`` by interpreter, of the snapshot at the last submit or resume.
    """
    directory = RunDir(run.directory)
    config: dict[str, Any] = {"recipe": dict(run.recipe)}
    with contextlib.suppress(HpcrlError):
        record = RunRecord.read(directory)
        config |= {
            "hpcrl_version": record.hpcrl_version,
            "git_commit": record.git_commit,
            "user": record.user,
            "command": " ".join(record.argv),
            "provenance": dict(record.provenance),
        }
    with contextlib.suppress(HpcrlError):
        config |= _plan_config(directory.plan())
    if (snapshot := read_snapshot(directory)) is not None:
        checkout = snapshot.checkout
        config["hpcrl"] = {
            "sha256": snapshot.hpcrl_sha256,
            "commit": "" if checkout is None else checkout.commit,
            "dirty": False if checkout is None else checkout.dirty,
            "diff_sha256": "" if checkout is None else checkout.diff_sha256,
        }
        config |= {"python": snapshot.python, "packages": dict(snapshot.packages)}
    # what a library cannot store is text
    return dict(json.loads(json.dumps(config, default=str)))


def _plan_config(plan: Plan) -> dict[str, Any]:
    """Return what a reader of curves asks of a plan, without commands and variables."""
    names = {"role", "replicas", "ranks", "nodes", "component", "per_node", "servers_per_node"}
    return {
        "cluster": plan.cluster,
        "nodes": sum(each.nodes for each in plan.groups),
        "gpus": plan.layout.gpus,
        "plan": {
            "layout": plan.layout.model_dump(mode="json", exclude={"sbatch_options"}),
            "groups": [group.model_dump(mode="json", include=names) for group in plan.groups],
        },
    }
