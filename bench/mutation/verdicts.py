"""What became of mutants, kept so that a campaign that was interrupted can continue."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from mutation.trials import digest_of


class Verdicts:
    """What became of mutants, in a file of one JSON object a line, so that a campaign can be interrupted.

    A verdict holds for one text of hpcrl and its tests: where a file of either was changed since, it is not read.
    """

    def __init__(self, path: Path | None, tree: Path) -> None:
        files = (path for place in ("hpcrl", "tests") for path in sorted((tree / place).rglob("*.py")))
        self._path, self._of = path, digest_of(list(files)) if path is not None else ""
        self._rows: dict[tuple[str, int], dict[str, object]] = {}
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        # the last line of a process that was killed may be cut: the next one begins behind it
        self._before = "\n" if text and not text.endswith("\n") else ""
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if value["of"] == self._of:
                    self._rows[value["row"]["name"], value["start"]] = value["row"]

    def of(self, name: str, start: int) -> dict[str, object] | None:
        """Return what became of the mutant of this name at this place; None if it was not tried."""
        return self._rows.get((name, start))

    def add(self, start: int, row: dict[str, object]) -> None:
        """Append what became of a mutant."""
        self._rows[str(row["name"]), start] = row
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(self._before + json.dumps({"of": self._of, "start": start, "row": row}) + "\n")
            self._before = ""
