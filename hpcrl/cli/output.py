"""Where commands print tables, and how they print JSON."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["fits", "json_text", "table_console"]

_PIPE_WIDTH = 1000


class _Rows(io.StringIO):
    """Standard output without the blanks with which a table fills its rows."""

    def write(self, text: str) -> int:
        sys.stdout.write("\n".join(line.rstrip(" ") for line in text.split("\n")))
        return len(text)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding

    def flush(self) -> None:
        sys.stdout.flush()


def table_console() -> Console:
    """Standard output; where it is no terminal a pipe or a file gets whole rows, and none ends in blanks."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH, file=_Rows())


def json_text(document: Any, *, indent: int | None = 2) -> str:
    """Return a document as JSON. A number that is not finite is null: JSON has none, and other readers refuse it."""
    import json

    from hpcrl.runs.lenient import finite

    return json.dumps(finite(document), indent=indent, allow_nan=False)


def fits(console: Console, table: Table) -> bool:
    """Whether a table has room without a cell that is wrapped."""
    # asked for its own width: within that of the console everything has room
    return console.measure(table, options=console.options.update(width=_PIPE_WIDTH)).maximum <= console.width
