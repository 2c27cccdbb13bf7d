"""Settings of a foreign file, by dotted key, and the record of what became of each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)
_MISSING = object()
_PATH = re.compile(r"\$(?:\{[A-Z_]+\}|[A-Z_]+)/[\w./-]+")
"""A path below a variable of the environment, which hpcrl expands as well."""


class Outcome(StrEnum):
    """Fate of a setting."""

    CARRIED = "carried"
    """The recipe has it, with the same meaning."""
    CHANGED = "changed"
    """The recipe has something near it; the note says how it differs."""
    NOT_NEEDED = "not needed"
    """hpcrl decides it itself, or by the cluster profile."""
    LOST = "lost"
    """hpcrl has no such thing."""
    UNKNOWN = "unknown"
    """The importer does not know the setting."""


@dataclass(frozen=True, slots=True)
class ForeignSetting:
    """A setting of the foreign file and its fate.

    Attributes
    ----------
    key, value:
        As the file has them.
    outcome:
        Its fate.
    target:
        Key of the recipe; empty where it has none.
    note:
        The reason, or the difference; may be empty for `Outcome.CARRIED`.
    """

    key: str
    value: Any
    outcome: Outcome
    target: str = ""
    note: str = ""


class Settings:
    """Settings of a foreign file, and the recipe that is made of them.

    Parameters
    ----------
    tree:
        The file as nested mappings. Lists are values.
    known:
        Keys that the system has; one with ``*`` or ``?`` stands for all that match. Other keys of the file are unknown
        unless the importer names them whole. Empty: all keys may be the system's.
    """

    def __init__(self, tree: Mapping[str, Any], known: Collection[str] = ()) -> None:
        self._all = dict(_flat(tree))
        patterns = [key for key in known if _is_pattern(key)]
        exact = frozenset(known)
        self._known = {
            key for key in self._all if not known or key in exact or any(fnmatchcase(key, each) for each in patterns)
        }
        self._fates: dict[str, ForeignSetting] = {}
        self.recipe: dict[str, Any] = {}
        # what a shell or a library would fill in is not known here
        self._values = {key: value for key, value in self._all.items() if _is_plain(value)}
        for key in self._all.keys() - self._values.keys():
            note = "its value is a reference or a command: write it into the recipe"
            self._fates[key] = ForeignSetting(key, self._all[key], Outcome.LOST, note=note)

    def fates(self) -> list[ForeignSetting]:
        """Return all settings in the order of the file; the others are unknown."""
        unknown = Outcome.UNKNOWN
        return [
            self._fates.get(key, ForeignSetting(key, value, unknown, note="hpcrl recipe import does not know it"))
            for key, value in self._all.items()
        ]

    def unsettled(self, prefix: str) -> list[tuple[str, Any]]:
        """Return keys and values of the settings below a prefix that no outcome was given yet."""
        return [(key, value) for key, value in self._all.items() if key.startswith(prefix) and key not in self._fates]

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that the file has; one that is null counts as absent."""
        return next((value for key in keys if (value := self._values.get(key)) is not None), default)

    def integer(self, *keys: str, default: int = 0) -> int:
        """Return the first of these settings that is a whole number; without one the default.

        The file is another program's: a value that cannot be read is lost, and counts as absent.
        """
        return self._converted(keys, _integer, default)

    def number(self, *keys: str, default: float = 0.0) -> float:
        """Return the first of these settings that is a finite number, as `integer` does."""
        return self._converted(keys, _finite, default)

    def _converted(self, keys: Sequence[str], convert: Callable[[Any], Number], default: Number) -> Number:
        for key in keys:
            if (value := self._values.get(key)) is None:
                continue
            try:
                return convert(value)
            except (TypeError, ValueError, OverflowError):
                self.settle(Outcome.LOST, f"{value!r} cannot be read here", key)
        return default

    def has(self, *keys: str) -> bool:
        """Return whether the file has one of these keys, with a value."""
        return self.get(*keys) is not None

    def put(self, target: str, value: Any) -> None:
        """Write a setting of the recipe."""
        *sections, name = target.split(".")
        holder = self.recipe
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[name] = value

    def carry(
        self, key: str, target: str, convert: Callable[[Any], Any] = lambda value: value, *, note: str = ""
    ) -> None:
        """Carry a setting over where the file has it.

        Parameters
        ----------
        convert:
            Makes the recipe's value; None of it leaves the setting out, which is then lost with ``note`` as its reason.
        note:
            Difference in meaning; with it the setting counts as changed.
        """
        value = self._values.get(key, _MISSING)
        if value is _MISSING:
            return
        if value is None:
            self.settle(Outcome.NOT_NEEDED, "it is null: the default holds", key)
            return
        try:
            converted = convert(value)
        except (TypeError, ValueError, OverflowError):
            converted, note = None, note or f"{value!r} cannot be read here"
        if converted is None:
            self.settle(Outcome.LOST, note or "hpcrl has no such value", key)
            return
        self.put(target, converted)
        self.settle(Outcome.CHANGED if note else Outcome.CARRIED, note, key, target=target)

    def settle(self, outcome: Outcome, note: str, *patterns: str, target: str = "") -> None:
        """Record the fate of all keys that match a pattern (``*``, ``?``) and have none yet.

        A pattern stands for keys that the system has: the importer knows nothing of what is in none of its files.
        """
        for key, value in self._values.items():
            if key in self._fates:
                continue
            if key in patterns or (key in self._known and any(fnmatchcase(key, pattern) for pattern in patterns)):
                self._fates[key] = ForeignSetting(key, value, outcome, target, note)


def _is_pattern(key: str) -> bool:
    return "*" in key or "?" in key


def _is_plain(value: Any) -> bool:
    """Return whether a value is one by itself, and no reference or command."""
    if isinstance(value, list):
        return all(_is_plain(each) for each in value)
    return "$" not in str(value) or _PATH.fullmatch(str(value)) is not None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{key}.")
        else:
            found.append((key, value))
    return found


def _integer(value: Any) -> int:
    number = int(value)
    if number != float(value):
        raise ValueError(f"{value!r} is not whole")
    return number


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number


def whole(value: Any) -> int | None:
    """Return a positive whole number; None of anything else."""
    number = int(value)
    return number if number > 0 and number == float(value) else None


def positive(value: Any) -> float | None:
    """Return a positive number; None of anything else."""
    number = float(value)
    return number if number > 0 else None
