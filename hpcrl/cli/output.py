"""Where commands print tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["table_console"]

_PIPE_WIDTH = 200


def table_console() -> Console:
    """Standard output; wide where it is no terminal, so that a pipe or a file gets whole rows."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
