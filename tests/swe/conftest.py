"""Fixtures of the tests of software-engineering tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from pytest_wheels import installed_wheels
from swe_lab import PYTHON, make_task, make_tree

from hpcrl.sandboxes import SandboxStartError
from hpcrl.sandboxes.bubblewrap import find_bubblewrap
from hpcrl.sandboxes.client import local_sandboxes
from hpcrl.swe.judging.prepared import PreparedTask, TaskPreparer
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.making.tools import build_tools
from hpcrl.swe.trees import write_tar


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The archive with pytest."""
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}")
    return build_tools(installed_wheels(tmp_path_factory.mktemp("wheels")), python=PYTHON)


@pytest.fixture
async def sandboxes() -> AsyncIterator[TaskSandboxes]:
    """Real sandboxes of this machine."""
    try:
        find_bubblewrap()
    except SandboxStartError as error:
        pytest.skip(str(error))
    async with local_sandboxes() as host:
        yield TaskSandboxes(host)


@pytest.fixture(scope="session")
def prepared(tools: bytes, tmp_path_factory: pytest.TempPathFactory) -> PreparedTask:
    """The task of the small repository."""
    directory = tmp_path_factory.mktemp("set")
    (directory / "trees").mkdir()
    tree = make_tree(tools)
    write_tar(directory / "trees/lengths.tar", {path: file for path, file in tree.items() if path[0] != "."})
    (directory / "tools.zip").write_bytes(tools)
    return TaskPreparer(directory).prepare(make_task())
