"""A way of the user's own by which weights of a step come to the engines (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.handoff import CustomSyncConfig
from hpcrl.config.recipe import Recipe
from hpcrl.extend import ExtensionError, call_extension, extension_path, import_object
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.publish.sync import WeightSync

_METHODS = ("restored", "begin_step", "publish", "end_step", "wait", "close")


@dataclass(frozen=True, slots=True)
class SyncParts:
    """Parts that a custom sync is made of.

    Attributes
    ----------
    files:
        The usual way, by files in the store of the run. Engines read versions there: a sync that calls this in each of
        its methods changes nothing for them.
    ranks:
        All ranks of the trainer, with collectives of their own.
    emit:
        Writes an event, on rank 0: its kind, and its data as keyword arguments.
    recipe:
        The resolved recipe.
    run_dir:
        The run directory.
    """

    files: WeightSync
    ranks: Ranks
    emit: Callable[..., Any]
    recipe: Recipe
    run_dir: Path


def find_factory(config: CustomSyncConfig) -> tuple[str, Callable[..., Any]]:
    """Return the path and the factory of a sync (ExtensionError where it cannot be imported)."""
    path = extension_path("transport", config.factory)
    return path, import_object(path, called="callable")


def make_custom_sync(config: CustomSyncConfig, parts: SyncParts) -> WeightSync:
    """Make a sync.

    Raises
    ------
    ExtensionError
        It cannot be imported or made, or lacks a method.
    """
    path, factory = find_factory(config)
    hint = "correct handoff.sync.parameters"
    made: WeightSync = call_extension(path, lambda: factory(parts, **config.parameters), hint)
    if missing := [name for name in _METHODS if not callable(getattr(made, name, None))]:
        hint = "see hpcrl.trainer.publish.sync.WeightSync"
        raise ExtensionError(f"{path} gave a {type(made).__name__}, which has no {', '.join(missing)}", hint)
    return made
