"""Checks of tasks: the right patch must get 1, and no patch 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.sandboxes import SandboxError
from hpcrl.sandboxes.client import local_sandboxes
from hpcrl.swe.judging.judge import SweJudge
from hpcrl.swe.judging.prepared import TaskPreparer
from hpcrl.swe.judging.script import solved
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.task import SweTask


@dataclass(slots=True)
class TaskCheck:
    """Result of the check of one task.

    Attributes
    ----------
    id:
        The task.
    problems:
        Problems of the task, a sentence each.
    wall_s:
        Seconds of its tests.
    """

    id: str
    problems: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"id": self.id, "problems": self.problems, "wall_s": self.wall_s}


async def check_swe_tasks(tasks: Sequence[SweTask], directory: Path) -> list[TaskCheck]:
    """Judge the right patch and no patch of each task, in sandboxes of this machine.

    Parameters
    ----------
    directory:
        Directory that paths of trees are relative to.

    Raises
    ------
    SandboxStartError
        The machine lacks what sandboxes need.
    """
    preparer = TaskPreparer(directory)
    async with local_sandboxes() as host:
        sandboxes = TaskSandboxes(host)
        return [await _check(sandboxes, preparer, task) for task in tasks]


async def _check(sandboxes: TaskSandboxes, preparer: TaskPreparer, task: SweTask) -> TaskCheck:
    found, judge = TaskCheck(task.id), SweJudge(sandboxes)
    try:
        prepared = preparer.prepare(task)
        solution = await solved(sandboxes, prepared) if task.solve else prepared.solution_patch
        if solution is None:
            found.problems.append("it has no right patch to compare with")
        else:
            verdict = await judge.judge(prepared, solution)
            found.wall_s += verdict.wall_s
            if verdict.reward < 1:
                found.problems.append(f"the right patch gets {verdict.reward:g}: {verdict.why}")
        verdict = await judge.judge(prepared, prepared.start_patch)
        found.wall_s += verdict.wall_s
        if verdict.reward > 0:
            found.problems.append(f"no patch gets {verdict.reward:g}")
        if verdict.tampered:
            found.problems.append(f"its own tests look like tampering: {verdict.why}")
    except (SandboxError, UsageError) as error:
        found.problems.append(str(error).partition("\n")[0])
    return found
