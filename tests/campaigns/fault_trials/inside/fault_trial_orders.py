"""What a process of a run with faults is told to do wrong: a file that the bench replaces and removes."""

from __future__ import annotations

import json
import os
from typing import Any


class Orders:
    """The newest order; read again only when the file has changed."""

    def __init__(self) -> None:
        self._path = os.environ.get("FAULT_TRIAL_ORDERS", "")
        self._seen = (0, 0)
        self._order: dict[str, Any] = {}
        self._done = 0

    def now(self, kind: str) -> dict[str, Any]:
        """Return the order of this kind; empty where there is none, or where it was followed often enough."""
        try:
            found = os.stat(self._path)
        except OSError:
            return {}
        if (found.st_ino, found.st_mtime_ns) != self._seen:
            with open(self._path, encoding="utf-8") as stream:
                self._order = json.load(stream)
            self._seen, self._done = (found.st_ino, found.st_mtime_ns), 0
        order = self._order
        if order.get("kind") != kind or order.get("pid", os.getpid()) != os.getpid():
            return {}
        return {} if self._done >= order.get("count", 1 << 30) else order

    def followed(self) -> None:
        """Count that the order was followed."""
        self._done += 1
