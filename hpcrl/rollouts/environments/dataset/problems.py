"""What is wrong with rows of a file: collected up to a limit, so that one look at the message mends many of them."""

from __future__ import annotations

from typing import Any

import msgspec

from hpcrl.errors import ConfigError, Finding
from hpcrl.screen_text import visible_line

__all__ = ["BadRowError", "Problems", "shown"]

_MAX_PROBLEMS = 10
"""Maximum number of bad rows that are named."""
_SHOWN = 80
"""Maximum number of characters of a row or a value that a message shows."""


class BadRowError(ValueError):
    """A row cannot be used: what is wrong, and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


class Problems:
    """Collects what is wrong with the files of one section of a recipe.

    Attributes
    ----------
    section:
        Its key, for example ``environments.NAME``.
    """

    def __init__(self, section: str) -> None:
        self.section = section
        self._found: list[Finding] = []

    def add(self, key: str, what: str, hint: str) -> None:
        """Keep one problem of the setting ``key`` (ConfigError with all of them where they are many)."""
        self._found.append(Finding("recipe", f"{self.section}.{key}", what, hint))
        if len(self._found) == _MAX_PROBLEMS:
            self._found.append(Finding("recipe", f"{self.section}.{key}", "the rest was not looked at", ""))
            raise ConfigError(self._found)

    def refuse(self) -> None:
        """Raise ConfigError where there are problems."""
        if self._found:
            raise ConfigError(self._found)


def shown(value: Any) -> str:
    """Show a value of a file in one line of a few characters, each of which can be printed."""
    if isinstance(value, bytes):
        value = value[: 4 * _SHOWN].decode("utf-8", "backslashreplace").strip()
    if not isinstance(value, str):
        try:
            value = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, msgspec.MsgspecError):
            value = repr(value)
    return visible_line(value, _SHOWN)
