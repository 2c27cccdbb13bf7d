"""Draw the live screen of a run as a picture: ``python tools/draw_screens.py RUN`` writes it into the docs.

What `hpcrl status RUN --watch` shows at this moment on a terminal of 80 columns and 24 lines, in its colours. The
picture in the docs is that of a quickstart in its middle.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from hpcrl.cli.selection import find
from hpcrl.runs.fleet import read_fleet
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.observe import observe
from hpcrl.runs.run_progress import read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.follow import fitted
from hpcrl.runs.views.usage import read_usage
from hpcrl.storage.files import atomic_write

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/images/status.svg"
_COLOURS = [
    (26, 26, 26),  # black
    (229, 100, 20),  # red
    (60, 200, 140),  # green
    (240, 228, 66),  # yellow
    (58, 143, 217),  # blue
    (221, 136, 184),  # magenta
    (127, 214, 232),  # cyan
    (187, 187, 187),  # white
]
THEME = TerminalTheme((12, 12, 12), (217, 217, 217), _COLOURS, _COLOURS)
"""After Okabe and Ito's palette, light enough for a dark ground: phases of a step can be told apart by everybody, as in
the picture of `hpcrl report`."""


def picture(run: RunDir, *, columns: int = 80, lines: int = 24) -> str:
    """The screen of a run as SVG."""
    console = Console(
        record=True, width=columns, height=lines, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    view, metrics = observe(run), read_metrics(run)
    progress, fleet = read_progress(run, metrics), read_fleet(run, view.attempt, view.components)
    console.print(fitted(console, view, progress, metrics, usage=read_usage(run, view), fleet=fleet))
    title = f"hpcrl status {run.name} --watch"
    drawn = console.export_svg(title=title, theme=THEME, unique_id="screen")
    # fonts of the reader's machine: a picture fetches nothing
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="name of a run, or its directory")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--lines", type=int, default=24)
    wanted = parser.parse_args()
    drawn = picture(find(wanted.run, None), columns=wanted.columns, lines=wanted.lines)
    wanted.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(wanted.output, drawn.encode())
    print(wanted.output)


if __name__ == "__main__":
    main()
