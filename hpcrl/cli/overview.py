"""List of all commands: one line each, in groups, on one screen of 80 columns and 24 lines."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill

GROUPS: dict[str, dict[str, str]] = {
    "Runs": {
        "submit": "start a run of a recipe",
        "sweep": "watch and continue sweeps",
        "resume": "continue an ended run",
        "status": "show state and progress",
        "ls": "list runs",
        "logs": "show the logs of roles",
        "why": "explain what ended a run",
        "wait": "wait for the end of runs",
        "report": "draw curves, or make a page",
        "board": "show runs in a browser",
        "compare": "compare runs",
        "trace": "write a trace for Perfetto",
        "profile": "profile a role that runs",
        "cancel": "stop runs",
        "requeue": "save, and restart later",
        "scale": "change the replica count",
        "shell": "open a shell at a role",
        "store": "show the pool of KV blocks",
        "eval": "evaluate a model or a run",
        "sft": "start supervised training",
        "rm": "remove ended runs",
    },
    "Planning and site": {
        "plan": "forecast memory and times",
        "simulate": "simulate the loop",
        "render": "write the sbatch scripts",
        "recipe": "list, check, show recipes",
        "env": "try environments",
        "notify": "test notifications",
        "cluster": "cluster profiles",
        "site": "environments of a site",
        "devcluster": "Slurm on this machine",
        "mcp": "serve coding agents",
    },
    "Data": {
        "checkpoint": "checkpoints of a run",
        "weights": "published policy versions",
        "rollouts": "rollouts of a run",
        "bundle": "pack a run to hand on",
        "share": "open a run to a group",
        "gc": "remove old runs",
        "sinks": "send metrics after the end",
        "model": "get and check models",
        "warmup": "make a small start model",
        "swe": "software-engineering tasks",
    },
}
"""A line for each command of hpcrl, by group."""
OTHERS = "Extensions"
"""Title of the commands that are in no group: those of other packages."""

_LEFT = ("Runs",)
_COLUMN = 40
"""Width of the left column."""
_WIDTH = 78
"""Minimum width of a terminal for two columns."""
_HEIGHT = 23
"""Maximum lines in two columns: the prompt of a terminal of 24 lines is below them."""
_HEAD = """\
Usage: hpcrl [--version] [--install-completion] COMMAND [ARGS]..."""
_SHORT = "Usage: hpcrl COMMAND [ARGS]... (hpcrl COMMAND --help; pages: docs/README.md)"
"""First line where the last one has no place."""
_AROUND = 4
"""Lines above and below the columns, with blank ones."""
_END = "hpcrl COMMAND --help explains a command. Pages: docs/README.md"


def overview(commands: Mapping[str, str], width: int) -> str:
    """Return the list of commands.

    Parameters
    ----------
    commands:
        Names of all commands, with the first paragraph of the help of those that are in none of `GROUPS`.
    width:
        Columns of the terminal; a narrow one gets the groups below each other.
    """
    groups = {
        title: {name: text for name, text in group.items() if name in commands} for title, group in GROUPS.items()
    }
    known = {name for group in groups.values() for name in group}
    others = {name: text for name, text in commands.items() if name not in known}
    left = [line for title in _LEFT for line in _lines(title, groups.pop(title))]
    right = [line for title, group in groups.items() for line in _lines(title, group)]
    if width >= _WIDTH:
        # the blank line behind the last group is not needed
        left, right = left[:-1], right[:-1]
        if max(len(left), len(right)) + _AROUND > _HEIGHT:
            left, right = [line for line in left if line], [line for line in right if line]
        rows = max(len(left), len(right))
        pairs = zip(left + [""] * (rows - len(left)), right + [""] * (rows - len(right)), strict=True)
        body = [f"{one:<{_COLUMN}}{other}".rstrip() for one, other in pairs] + [""]
    else:
        body = [line[:width] for line in left + right]
    if others:
        # one that cannot be used says why, in more than a line
        wrapped = (fill(line, width, subsequent_indent=" " * 13) for line in _lines(OTHERS, others))
        body += [line for text in wrapped for line in text.split("\n")]
    lines = [*_HEAD.split("\n"), "", *body, _END]
    if width >= _WIDTH and len(lines) > _HEIGHT:
        # the columns need the lines that are blank around them
        lines = [line for line in lines if line]
    if width >= _WIDTH and len(lines) > _HEIGHT:
        lines = [_SHORT, *lines[1:-1]]
    return "\n".join(lines)


def _lines(title: str, group: Mapping[str, str]) -> list[str]:
    """Return a group with its title, and a blank line behind it."""
    if not group:
        return []
    return [title, *(f"  {name:<10} {' '.join(text.split())}" for name, text in group.items()), ""]
