"""The program that plots in a page, from the package plotly."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from hpcrl.errors import MissingExtraError

_TRACE = "bar"
"""Kind of trace that pages draw besides lines, which are a part of the core."""
_REGISTER = ".register(["
_CALLS = re.compile(r"[\w$]+\(\)(?:,[\w$]+\(\))*")


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
    return with_drawn_traces(program.read_text(encoding="utf-8"))


def with_drawn_traces(program: str) -> str:
    """Return a program that starts only the kinds of traces that pages draw.

    The program ends with a list of its kinds of traces, maps and surfaces among them. Each is a module that runs when
    the list calls it, and a browser compiles what runs: with one of 47 it needs 0.6 times the seconds. A program of
    another form is returned as it is.
    """
    begin = program.rfind(_REGISTER) + len(_REGISTER)
    end = program.find("])", begin)
    if begin < len(_REGISTER) or end < 0 or _CALLS.fullmatch(program, begin, end) is None:
        return program
    names = (call.removesuffix("()") for call in program[begin:end].split(","))
    wanted = next((name for name in names if _is_trace(program, name)), None)
    return program if wanted is None else f"{program[:begin]}{wanted}(){program[end:]}"


def _is_trace(program: str, name: str) -> bool:
    """Return whether a module of the list is that of `_TRACE`: it hands on another one, which has the name."""
    handed_on = re.search(r"exports=([\w$]+)\(\)\}\)", _module(program, name)[:200])
    return handed_on is not None and f'moduleType:"trace",name:"{_TRACE}"' in _module(program, handed_on[1])


def _module(program: str, name: str) -> str:
    """Return the text of a module, which ends where the next one begins; empty where there is none."""
    begin = program.find(f"var {name}=")
    return "" if begin < 0 else program[begin : program.find("});var ", begin) + 2]
