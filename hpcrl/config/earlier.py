"""Forms of recipes and cluster profiles: which one is current, and how files of earlier ones are read and changed.

A file may state its form (``schema: 1``); the files in a run directory do. What a run of an earlier version was given
is read as it is. A file that a person keeps is changed by ``hpcrl recipe migrate`` and ``hpcrl cluster migrate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.yamltree import KeyPath
from hpcrl.errors import ConfigError, Finding

SCHEMA = 1
"""Number of the current form. A file without one may be of any form up to this."""

FileKind = Literal["recipe", "cluster profile"]


@dataclass(frozen=True)
class Edit:
    """Change of one setting.

    Attributes
    ----------
    path:
        The setting, whose value is a number, a text, true, false or null.
    key:
        Key that says the same now; None where the setting is removed.
    value:
        Value of that key.
    section:
        Section of that key, in which the setting is, at any depth.
    by_hand:
        Reason why only a person can make the change; empty where `hpcrl.config.migrate` can.
    """

    path: KeyPath
    key: str | None = None
    value: Any = None
    section: KeyPath = ()
    by_hand: str = ""


def take_schema(tree: dict[str, Any], where: str) -> int | None:
    """Remove the number of the form from a file's tree and return it; None where the file does not state it.

    Raises
    ------
    ConfigError
        The number is not one, or of a later version of hpcrl.
    """
    if "schema" not in tree:
        return None
    schema = tree.pop("schema")
    if type(schema) is not int or schema < 1:
        raise ConfigError([Finding(where, "schema", f"must be a whole number from 1 to {SCHEMA}, is {schema!r}")])
    if schema > SCHEMA:
        what = f"is {schema}: a later version of hpcrl made this file, and this one reads forms up to {SCHEMA}"
        raise ConfigError([Finding(where, "schema", what, "install the version that made it, or a later one")])
    return schema


def read_earlier(kind: FileKind, tree: dict[str, Any]) -> None:
    """Remove settings of earlier forms that had no effect, as runs of earlier versions have them."""
    for edit in edits_of(kind, tree):
        if edit.key is None and not edit.by_hand and _without_effect(edit.path, value_at(tree, edit.path)):
            remove_setting(tree, edit.path)


def edits_of(kind: FileKind, tree: Mapping[str, Any]) -> list[Edit]:
    """Return the changes that bring a file into the current form, in the order in which they are made."""
    return list(_of_profile(tree) if kind == "cluster profile" else _of_recipe(tree))


def value_at(tree: Any, path: KeyPath) -> Any:
    """Return the value at a path that exists."""
    for part in path:
        tree = tree[part]
    return tree


def remove_setting(tree: Any, path: KeyPath) -> None:
    """Remove a setting, and the mappings that it leaves empty."""
    del value_at(tree, path[:-1])[path[-1]]
    while len(path) > 1 and isinstance(path[-2], str) and not value_at(tree, path := path[:-1]):
        del value_at(tree, path[:-1])[path[-1]]


def _of_recipe(tree: Mapping[str, Any]) -> Iterator[Edit]:
    trainer = _mapping(tree, "trainer")
    memory = _mapping(trainer, "memory")
    if memory.get("fp8"):
        yield _moved(("trainer", "memory", "fp8"), trainer, ("trainer",), "precision", {"fp8": {}})
    elif "fp8" in memory:
        yield Edit(("trainer", "memory", "fp8"))
    if memory.get("lora_rank"):
        yield _moved(("trainer", "memory", "lora_rank"), trainer, ("trainer",), "lora", {"rank": memory["lora_rank"]})
    elif "lora_rank" in memory:
        yield Edit(("trainer", "memory", "lora_rank"))
    sets = _mapping(tree, "evaluation").get("sets")
    for index, item in enumerate(sets if isinstance(sets, list) else ()):
        if isinstance(item, dict) and "temperature" in item:
            section: KeyPath = ("evaluation", "sets", index)
            yield _moved((*section, "temperature"), item, section, "sampling", {"temperature": item["temperature"]})
    yield from (Edit(("algorithm", "loss", name)) for name in _other_losses(_mapping(tree, "algorithm").get("loss")))


def _of_profile(tree: Mapping[str, Any]) -> Iterator[Edit]:
    if "preempt_signal" in _mapping(tree, "capabilities"):
        yield Edit(("capabilities", "preempt_signal"))
    partitions = _mapping(tree, "partitions")
    for name in partitions:
        if "scratch_gb_s" in _mapping(_mapping(partitions, name), "node"):
            yield Edit(("partitions", name, "node", "scratch_gb_s"))


def _moved(path: KeyPath, given: Mapping[str, Any], section: KeyPath, key: str, value: Any) -> Edit:
    """Return the change of a setting that is a section of its own now, in ``section``, which has ``given``."""
    if key in given:
        return Edit(path, by_hand=f"write it into {key}, which the file has already: {value}")
    return Edit(path, key, value, section)


def _other_losses(loss: Any) -> list[str]:
    """Return the settings of other losses, which have no effect on the chosen one."""
    from hpcrl.config.algorithm import settings_of_other_losses  # noqa: PLC0415 - not for lists of many runs

    return settings_of_other_losses(loss) if isinstance(loss, dict) else []


def _without_effect(path: KeyPath, value: Any) -> bool:
    """Return whether a run of an earlier version has it although it does nothing; losses are read by their model."""
    return path[-1] in ("scratch_gb_s", "preempt_signal") or (path[0] == "trainer" and not value)


def _mapping(tree: Any, key: str) -> Mapping[str, Any]:
    found = tree.get(key) if isinstance(tree, dict) else None
    return found if isinstance(found, dict) else {}
