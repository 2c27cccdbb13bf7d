"""Judges a patch that a program has printed, by the tests of a task: a reward for programs of ``kind: harness``.

::

    columns: {answer: id}
    rewards:
      - {kind: function, function: "hpcrl.swe.judging.printed_patch:judge_printed_patch",
         args: {tasks: /data/tasks.jsonl, disk_gib: 2}, timeout_s: 600}

The patch is a unified diff against what the program found, as ``git diff`` prints it. It is judged in a fresh sandbox,
as the work of a policy of ``kind: swe`` is.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from pathlib import Path
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.sandboxes import Patch, SandboxLimits
from hpcrl.sandboxes.on_demand import SandboxesOnDemand
from hpcrl.swe.diffs import DiffError, apply_diff, parse_diff
from hpcrl.swe.judging.judge import SweJudge, SweVerdict
from hpcrl.swe.judging.prepared import PreparedTask, TaskPreparer, changes_of
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.task import SweTask, read_tasks

_log = logging.getLogger(__name__)
_GIB = 1 << 30


def judge_printed_patch(
    reply: str, answer: str, row: dict[str, Any], *, tasks: str, memory_gib: float = 2.0, disk_gib: float = 1.0
) -> float:
    """Return the reward of a patch, from 0 to 1, by the tests of its task. It is a function of a reward ``function``.

    Parameters
    ----------
    reply:
        Unified diff against the repository as the program found it; empty for no change.
    answer:
        Id of the task.
    row:
        The row of the program's task, which is not read.
    tasks:
        Task file of ``kind: swe`` (``hpcrl-swe-1``), by an absolute path.
    memory_gib, disk_gib:
        Memory and files of the sandbox, as of ``kind: swe``.

    Raises
    ------
    UsageError
        The file has no such task, or cannot be read.
    SandboxError
        The tests could not be run, so there is no reward.
    """
    return _bench(tasks, memory_gib, disk_gib).judge(answer, reply)


class _JudgeBench:
    """The tasks of a file and sandboxes for them, as long as this process lives."""

    def __init__(self, path: Path, limits: SandboxLimits) -> None:
        self._tasks: dict[str, SweTask] = {task.id: task for task in read_tasks(path)}
        self._preparer = TaskPreparer(path.parent)
        self._sandboxes = SandboxesOnDemand(lambda host: TaskSandboxes(host, limits=limits))
        # one loop for all calls: the connection with the daemon of sandboxes belongs to it
        self._runner = asyncio.Runner()

    def judge(self, name: str, patch: str) -> float:
        task = self._tasks.get(name)
        if task is None:
            raise UsageError(f"there is no task {name!r} in the task file\n    hint: set columns.answer to its id")
        prepared = self._preparer.prepare(task)
        try:
            changed = _changed(prepared, patch)
        except DiffError as error:
            _log.info("task %s: %s", name, error)
            return 0.0
        if not changed:
            return 0.0  # the tests of FAIL_TO_PASS fail without a change
        whole = changes_of(prepared.tree, {**prepared.start, **changed})
        return self._runner.run(self._verdict(prepared, whole)).reward

    async def _verdict(self, prepared: PreparedTask, patch: Patch) -> SweVerdict:
        async def judged(sandboxes: TaskSandboxes) -> SweVerdict:
            async with sandboxes.using(prepared):
                return await SweJudge(sandboxes).judge(prepared, patch)

        _, verdict = await self._sandboxes.start(judged)
        return verdict


def _changed(prepared: PreparedTask, patch: str) -> dict[str, str | None]:
    """Return the text of each file that a patch changes (DiffError where it does not fit)."""
    diff = parse_diff(patch if patch.endswith("\n") else f"{patch}\n")
    texts: dict[str, str] = {}
    for path in {path for each in diff for path in (each.old, each.new) if path is not None}:
        text = _found(prepared, path)
        if text is not None:
            texts[path] = text
    return apply_diff(diff, texts)


def _found(prepared: PreparedTask, path: str) -> str | None:
    """Return the text of a file as the program finds it; None where there is none, or one that is not text."""
    if path in prepared.start:
        return prepared.start[path]
    file = prepared.tree.get(path)
    try:
        return None if file is None or file.link else file.content.decode()
    except UnicodeDecodeError:
        return None


@functools.cache
def _bench(tasks: str, memory_gib: float, disk_gib: float) -> _JudgeBench:
    for name, value in (("memory_gib", memory_gib), ("disk_gib", disk_gib)):
        if not value > 0:
            raise UsageError(f"{name} is {value!r}\n    hint: give a number above 0")
    limits = SandboxLimits(memory_bytes=int(memory_gib * _GIB), disk_bytes=int(disk_gib * _GIB), processes=256)
    return _JudgeBench(Path(tasks), limits)
