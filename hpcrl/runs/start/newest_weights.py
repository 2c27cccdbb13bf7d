"""Weights of a run that an evaluation uses."""

from __future__ import annotations

from hpcrl.errors import HandoffError, UsageError
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.weights.store import HandoffStore


def newest_weights(run: RunDir, version: int | None) -> str:
    """Return the ``--from`` argument of a run's weights: a version, or the newest full one, or a checkpoint.

    Raises
    ------
    UsageError
        It has neither.
    """
    if version is not None:
        return f"{run.path}@v{version}"
    store = HandoffStore(run.weights_dir)
    for number in reversed(store.versions()):
        try:
            if store.open(number).manifest.kind == "full":
                return f"{run.path}@v{number}"
        except HandoffError:
            continue  # collected meanwhile, or damaged: use an older version or a checkpoint
    if not any(run.checkpoints_dir.glob("step-*")):
        raise UsageError(
            f"{run.name} has no full version and no checkpoint whose weights could be evaluated\n"
            f"    hint: hpcrl weights ls {reference(run)}; its start model: hpcrl eval {run.recipe_path}"
        )
    return str(run.path)
