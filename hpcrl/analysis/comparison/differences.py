"""Differences between runs in recipe, cluster profile, code, versions, data and start model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcrl.config.load import leaves
from hpcrl.config.secret_values import hide_value
from hpcrl.errors import HpcrlError
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.snapshot import read_snapshot
from hpcrl.runs.start.task_files import short_data

UNKNOWN = "unknown"
NOT_SET = "-"
_REPLICATES_DIFFER = ("recipe.seed", "recipe.name", "recipe.description")
"""Settings in which runs of one experiment may differ."""
_SHORT_HASH = 12


class RunDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in which runs differ.

    Attributes
    ----------
    key:
        Dotted name: ``recipe.trainer.steps``, ``code.commit``, ``package.torch``.
    values:
        Value of each run; ``unknown`` where the run does not say it, ``-`` where it has no such setting.
    """

    key: str
    values: list[str]


def find_differences(runs: Sequence[RunDir]) -> list[RunDifference]:
    """Return everything in which the runs differ, settings first."""
    found = []
    for read, missing in ((_settings, NOT_SET), (_code, UNKNOWN)):
        sides = [read(run) for run in runs]
        for key in dict.fromkeys(key for side in sides if side is not None for key in side):
            values = [UNKNOWN if side is None else side.get(key, missing) for side in sides]
            # a value that some runs do not say does not count as a difference
            if len({value for value in values if value != UNKNOWN}) > 1:
                found.append(RunDifference(key=key, values=values))
    return found


def equal_settings(runs: Sequence[RunDir]) -> list[list[int]]:
    """Return the numbers of the runs that differ in nothing but their seed, name and description, in groups.

    A run whose settings, code or data are unknown is alone; data of runs of earlier versions are not on record.
    """
    groups: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        settings, code = _settings(run), _code(run)
        known = settings is not None and code.get("code.files", UNKNOWN) != UNKNOWN
        known = known and not any(key.startswith("data.") and value == UNKNOWN for key, value in code.items())
        kept = {key: value for key, value in (settings or {}).items() if key not in _REPLICATES_DIFFER}
        key = (tuple(kept.items()), tuple(code.items())) if known else number
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _settings(run: RunDir) -> dict[str, str] | None:
    try:
        recipe, cluster = run.recipe(), run.cluster()
    except (HpcrlError, OSError, ValueError):
        return None  # of a version that this one cannot read
    # what is refused today may stand in runs of earlier versions
    found = {f"recipe.{'.'.join(map(str, path))}": hide_value(path, str(value)) for path, value in leaves(recipe)}
    return found | {f"cluster.{'.'.join(map(str, path))}": str(value) for path, value in leaves(cluster)}


def _code(run: RunDir) -> dict[str, str]:
    record, snapshot = RunRecord.read(run), read_snapshot(run)
    found = {
        "code.hpcrl": record.hpcrl_version,
        "code.called_in": record.git_commit[:_SHORT_HASH] or UNKNOWN,
        "model.origin": "model.path" if record.origin is None else str(record.origin),
    }
    if snapshot is None:
        return found
    checkout = snapshot.checkout
    if checkout is not None:
        changed = f" + changes {checkout.diff_sha256[:_SHORT_HASH]}" if checkout.dirty else ""
        found["code.commit"] = checkout.commit[:_SHORT_HASH] + changed
    found |= {
        "code.hpcrl": snapshot.hpcrl_version,
        "code.files": snapshot.hpcrl_sha256[:_SHORT_HASH],
        "code.python": snapshot.python,
    }
    versions: dict[str, list[str]] = {}
    for packages in snapshot.packages.values():
        for name, version in packages.items():
            if version not in versions.setdefault(name, []):
                versions[name].append(version)
    found |= {f"package.{name}": ", ".join(each) for name, each in sorted(versions.items())}
    found |= {
        f"environment.{name}": module.sha256[:_SHORT_HASH] or UNKNOWN for name, module in snapshot.environments.items()
    }
    return found | {f"data.{path}": short_data(state) or UNKNOWN for path, state in snapshot.data.items()}
