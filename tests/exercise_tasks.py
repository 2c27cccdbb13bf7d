"""The tasks of `hpcrl swe exercises`, made with the installed pytest."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_wheels import installed_wheels

from hpcrl.sandboxes import SandboxStartError
from hpcrl.sandboxes.bubblewrap import find_bubblewrap
from hpcrl.swe.making.exercises import write_exercises
from hpcrl.swe.making.tools import build_tools

#: the interpreter of sandboxes
NODE_PYTHON = Path("/usr/bin/python3")


def make_exercises(directory: Path, *, tasks: int) -> Path:
    """Return a new file ``tasks.jsonl``; the test is skipped where there are no sandboxes."""
    try:
        find_bubblewrap()
    except SandboxStartError as error:
        pytest.skip(str(error))
    if not NODE_PYTHON.exists():
        pytest.skip(f"there is no {NODE_PYTHON}")
    tools = build_tools(installed_wheels(directory), python=NODE_PYTHON)
    write_exercises(directory / "set", tasks=tasks, seed=0, tools=tools, python=NODE_PYTHON)
    return directory / "set/tasks.jsonl"
