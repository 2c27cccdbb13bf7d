"""Resolved recipes with the provenance of their values, and differences of several runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcrl.analysis.page.material import RunMaterial
from hpcrl.config.secret_values import hide_value
from hpcrl.runs.start.snapshot import Snapshot, read_snapshot
from hpcrl.runs.start.task_files import short_data


def recipe_values(material: RunMaterial) -> dict[str, str]:
    """Return the values of a resolved recipe as JSON by dotted key, without those that are secrets by their names."""
    values = _flat("", material.recipe.model_dump(mode="json"))
    # what is refused today may stand in runs of earlier versions
    return {key: hide_value(tuple(key.split(".")), value) for key, value in values}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), each)
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for index, each in enumerate(value):
            yield from _flat(f"{prefix}.{index}", each)
    else:
        yield prefix, json.dumps(value, ensure_ascii=False)


def recipe_rows(material: RunMaterial) -> list[dict[str, str]]:
    """Return key, value and source of each value; ``default`` where neither recipe nor command line has it."""
    sources = material.record.provenance
    return [
        {"key": key, "value": value, "source": _source(key, sources)} for key, value in recipe_values(material).items()
    ]


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Return the source of a value: its own, or that of the nearest part that is a list or a whole."""
    if key in sources:
        return sources[key]
    # parts of a value that was given as a whole, such as the items of a list, have its source
    above, _, last = key.rpartition(".")
    return sources[above] if last.isdecimal() and above in sources else "default"


def recipe_differences(runs: Sequence[RunMaterial]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between runs, with the value of each run; None where it has no such key."""
    values = [recipe_values(each) for each in runs]
    keys = dict.fromkeys(key for each in values for key in each)
    # the name says nothing about what a run does
    return [
        {"key": key, "values": [each.get(key) for each in values]}
        for key in keys
        if key not in ("name", "description") and len({each.get(key) for each in values}) > 1
    ]


def code_values(material: RunMaterial) -> dict[str, str]:
    """Return what a run ran: versions, commit, packages, hashes of the modules of environments, model and data."""
    record = material.record
    found = {
        "hpcrl": record.hpcrl_version,
        "commit of the working directory": record.git_commit or "unknown",
        "start weights": "model.path" if record.origin is None else str(record.origin),
        "cluster profile": record.cluster_sha256[:12],
    }
    snapshot = read_snapshot(material.run)
    return found if snapshot is None else found | _snapshot_values(snapshot)


def _snapshot_values(snapshot: Snapshot) -> dict[str, str]:
    found = {"files of hpcrl": snapshot.hpcrl_sha256[:12], "Python": snapshot.python}
    if snapshot.checkout is not None:
        changed = " with uncommitted changes" if snapshot.checkout.dirty else ""
        found["commit of hpcrl"] = snapshot.checkout.commit[:12] + changed
        if snapshot.checkout.dirty:
            found["uncommitted changes"] = snapshot.checkout.diff_sha256[:12]
    for packages in snapshot.packages.values():
        found |= {f"package {name}": version for name, version in packages.items()}
    found |= {f"environment {name}": files.sha256[:12] for name, files in snapshot.environments.items()}
    return found | {f"data {path}": short_data(state) or "unknown" for path, state in snapshot.data.items()}


def code_differences(runs: Sequence[RunMaterial]) -> list[dict[str, Any]]:
    """Return what differs in the code of runs, as `recipe_differences` does."""
    values = [code_values(each) for each in runs]
    keys = dict.fromkeys(key for each in values for key in each)
    return [
        {"key": key, "values": [each.get(key) for each in values]}
        for key in keys
        if len({each.get(key) for each in values}) > 1
    ]
