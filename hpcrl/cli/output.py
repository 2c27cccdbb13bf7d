"""The one way in which commands print.

What commands print is full of text that others wrote: rollouts, logs, names, errors. `say` and the consoles of this
module show control characters and do not hand them to the terminal, and take no text for markup or for the name of an
emoji. A test keeps other ways to print out of the command line.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hpcrl.reporting.screen_text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_PIPE_WIDTH = 1000


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text to standard output, or to standard error.

    A JSON document stays equal: see `hpcrl.reporting.screen_text.visible`.
    """
    say_raw(visible(str(text)), err=err, nl=nl)


def say_raw(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text as it is: for what a shell or another program reads, and never for what others wrote."""
    import typer

    typer.echo(text, err=err, nl=nl)


def json_text(document: Any, *, indent: int | None = 2) -> str:
    """Return a document as JSON. A number that is not finite is null: JSON has none, and other readers refuse it."""
    import json

    from hpcrl.runs.lenient import finite

    return json.dumps(finite(document), indent=indent, allow_nan=False)


def markup(template: str, *values: object) -> Text:
    """Return a styled text: ``template`` is rich's markup with a ``{}`` for each value, and values are text alone."""
    from rich.markup import escape
    from rich.text import Text

    return Text.from_markup(template.format(*(escape(visible(str(value))) for value in values)), emoji=False)


def as_text(text: str | Text) -> Text:
    """Return a text that has no styles unless it came with them."""
    from rich.text import Text

    return text if isinstance(text, Text) else Text(visible(text))


def screen(*, err: bool = False) -> Console:
    """Return a console on standard output, or on standard error."""
    return _screen_class()(stderr=err)


def table_console() -> Console:
    """Return a console for tables on standard output.

    Where that is not a terminal a pipe or a file gets whole rows, and none ends in blanks.
    """
    return screen() if sys.stdout.isatty() else _screen_class()(width=_PIPE_WIDTH, file=_Rows())


def fits(console: Console, table: Table) -> bool:
    """Return whether a table has room without a cell that is wrapped."""
    # measured at a large width: within the console's width every table fits by wrapping
    return console.measure(table, options=console.options.update(width=_PIPE_WIDTH)).maximum <= console.width


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


@functools.cache
def _screen_class() -> type[Console]:
    """Make the class of consoles when one is used: rich is not imported with the command line."""
    from rich.console import Console
    from rich.segment import Segment

    class Screen(Console):
        def __init__(self, **options: Any) -> None:
            super().__init__(markup=False, emoji=False, **options)

        def render_str(self, text: str, **options: Any) -> Text:
            # before the layout, because the visible form is longer than the character
            return super().render_str(visible(text), **options)

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                # rich's own cursor movements are control segments
                safe = segment.text if segment.control else visible(segment.text)
                yield segment if safe is segment.text else Segment(safe, segment.style)

    return Screen
