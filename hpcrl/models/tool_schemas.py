"""Schemas of tools as chat templates read them, prepared once: a conversation offers the same tools at each turn.

A template gets the same data as without this. The schemas are copied, searched for control tokens and marked once, and
their JSON is kept with them, because templates write it with ``tojson`` at each rendering.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcrl.models.control_tokens import ControlTokens
from hpcrl.models.foreign_text import Substitutes
from hpcrl.models.kept_json import with_kept_json

_MAX_KEPT = 64
"""Maximum number of different lists of tools that are kept."""
_MAX_BYTES = 1 << 17
"""Maximum size of tools that are kept."""
_MARSHAL_VERSION = 2
"""The last version whose bytes depend on values alone, and not on references."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTools:
    """Tools of a conversation.

    Attributes
    ----------
    data:
        Plain data for a template. Must not be changed.
    texts:
        All strings in it.
    marked, substitutes:
        The same data with texts marked that could be taken for control tokens, and the substitutes in it; None where
        there is no such text.
    """

    data: Any
    texts: frozenset[str]
    marked: Any = None
    substitutes: Substitutes | None = None


class ToolSchemas:
    """Prepares tools, and keeps what it has prepared."""

    def __init__(self, plain: Callable[[Any, Callable[[str], str]], Any], control: ControlTokens) -> None:
        """Begin without any.

        Parameters
        ----------
        plain:
            Returns plain data of tools, with each string replaced by the result of a function.
        """
        self._plain, self._control = plain, control
        self._kept: dict[bytes, PreparedTools] = {}

    def prepare(self, tools: Any) -> PreparedTools:
        """Return tools for a template. Equal ones of Python's own types are prepared once."""
        try:
            # exact types alone, and tells 1, 1.0 and True, lists and tuples apart
            key = marshal.dumps(tools, _MARSHAL_VERSION)
        except ValueError:
            return self._prepared(tools)
        found = self._kept.get(key)
        if found is None:
            found = self._prepared(tools)
            if len(key) > _MAX_BYTES:
                return found
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found

    def _prepared(self, tools: Any) -> PreparedTools:
        texts: set[str] = set()

        def collect(text: str) -> str:
            texts.add(text)
            return text

        data = with_kept_json(self._plain(tools, collect))
        spelled = set(filter(self._control.spells, texts))
        if not spelled:
            return PreparedTools(data, frozenset(texts))
        substitutes = Substitutes(texts)

        def mark(text: str) -> str:
            return self._control.mark(text, substitutes) if text in spelled else text

        return PreparedTools(data, frozenset(texts), with_kept_json(self._plain(tools, mark)), substitutes)
