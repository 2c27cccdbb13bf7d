"""Problems of the rows of a file, collected up to a limit, so that one message lists several of them."""

from __future__ import annotations

from typing import Any

import msgspec

from hpcrl.errors import ConfigError, Finding
from hpcrl.reporting.screen_text import visible_line

_MAX_PROBLEMS = 10
"""Maximum number of bad rows that are named."""
_SHOWN = 80
"""Maximum number of characters of a row or a value that a message shows."""


class BadRowError(ValueError):
    """Raised where a row cannot be used; has a problem and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


class Problems:
    """Collects the problems of the files of one section of a recipe.

    Attributes
    ----------
    section:
        Its key, for example ``environments.NAME``.
    """

    def __init__(self, section: str) -> None:
        self.section = section
        self._found: list[Finding] = []

    def add(self, key: str, what: str, hint: str) -> None:
        """Record one problem of the setting ``key`` (ConfigError with all of them once they are many)."""
        self._found.append(Finding("recipe", f"{self.section}.{key}", what, hint))
        if len(self._found) == _MAX_PROBLEMS:
            self._found.append(Finding("recipe", f"{self.section}.{key}", "the rest was not checked", ""))
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
