"""Which weights of a run are evaluated."""

from __future__ import annotations

from hpcrl.errors import HandoffError, UsageError
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.weights.store import HandoffStore

__all__ = ["newest_weights"]


def newest_weights(run: RunDir, version: int | None) -> str:
    """Return what ``--from`` calls the weights of a run: a version, or the newest full one, or the newest checkpoint.

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
            continue  # it was collected meanwhile, or is damaged: an older one is as good as a checkpoint
    if not any(run.checkpoints_dir.glob("step-*")):
        raise UsageError(
            f"{run.name} has no full version and no checkpoint whose weights could be evaluated\n"
            f"    hint: hpcrl weights ls {reference(run)}; its start model: hpcrl eval {run.recipe_path}"
        )
    return str(run.path)
