"""The program that plots in a page, from the package plotly."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hpcrl.errors import MissingExtraError


def read_plotly() -> str:
    """Return the program, which is a file of the package; nothing of the package is imported.

    Raises
    ------
    MissingExtraError
        plotly is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    program = None if spec is None or spec.origin is None else Path(spec.origin).parent / "package_data/plotly.min.js"
    if program is None or not program.is_file():
        raise MissingExtraError("report", "plotly")
    return program.read_text(encoding="utf-8")
