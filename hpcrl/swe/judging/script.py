"""Judging by the script of a task of Harbor: it runs in a fresh sandbox and leaves a reward.

The script is trusted to protect its own result: code under test runs with the same rights as the script.
"""

from __future__ import annotations

import math
import re

import msgspec

from hpcrl.sandboxes import ExecResult, Patch, SandboxFile
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.swe.judging.paths import HIDDEN_DIRECTORY
from hpcrl.swe.judging.prepared import PreparedTask
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.task import SweTask

_LOGS = "/tmp/logs/verifier"
_REWARDS = (f"{_LOGS}/reward.txt", f"{_LOGS}/reward.json")
_MAX_REWARD_BYTES = 1 << 16
_SOLUTION = "/tmp/solution"
SOLVE = f"exec bash {_SOLUTION}/solve.sh"
"""Command of a shell that runs the solution of a task."""
_PLACE = re.compile(r"(?<![\w.~)}*/-])/(tests|logs/verifier|solution)(?![\w.-])")
"""The absolute paths of Harbor, and no others that end alike, such as ``/app/tests`` and ``$ROOT/tests``."""


async def run_script(sandboxes: TaskSandboxes, prepared: PreparedTask, patch: Patch) -> tuple[float | None, ExecResult]:
    """Run ``tests/test.sh`` on a patched tree; return the reward and how it ended.

    The reward is None where the script has left none, or one that is not a number from 0 to 1. Paths ``/tests`` and
    ``/logs/verifier`` in the script's files become paths of the sandbox that can be written.

    Raises
    ------
    SandboxError
        It could not be run.
    """
    task = prepared.task
    tests = f"{task.directory}/{HIDDEN_DIRECTORY}/tests"
    files = {
        f"{HIDDEN_DIRECTORY}/{path}": SandboxFile(_placed(text, tests).encode(), executable=path.endswith(".sh"))
        for path, text in task.script.items()
    }
    sandbox = await sandboxes.start(prepared)
    try:
        await sandbox.apply(patch)
        await sandbox.put(files)
        command = f"mkdir -p {_LOGS} && exec bash {tests}/test.sh"
        result = await sandbox.exec(["/bin/bash", "-c", command], timeout_s=task.timeout_s, env=task.script_env)
        found = await sandbox.get(_REWARDS, max_bytes=_MAX_REWARD_BYTES)
    finally:
        await sandbox.kill()
    return next((_number(found[path]) for path in _REWARDS if path in found), None), result


async def solved(sandboxes: TaskSandboxes, prepared: PreparedTask) -> Patch:
    """Run ``solution/solve.sh`` as an agent would, and return all changes against the tree.

    Raises
    ------
    SandboxError
        It could not be run.
    """
    sandbox = await sandboxes.start(prepared)
    try:
        await sandbox.apply(prepared.start_patch)
        await sandbox.put({path: text.encode() for path, text in solution_files(prepared.task).items()})
        timeout_s = prepared.task.agent_timeout_s or prepared.task.timeout_s
        await sandbox.exec(["/bin/bash", "-c", SOLVE], timeout_s=timeout_s)
        return await sandbox.diff(await sandboxes.tree_name(prepared))
    finally:
        await sandbox.kill()


def solution_files(task: SweTask) -> dict[str, str]:
    """Return the text of the files of a task's solution by their paths in the sandbox."""
    tests = f"{task.directory}/{HIDDEN_DIRECTORY}/tests"
    return {f"/tmp/{path}": _placed(text, tests) for path, text in task.solve.items()}


def _placed(text: str, tests: str) -> str:
    """Return the text of a file of Harbor with paths of the sandbox in it."""
    places = {"tests": tests, "logs/verifier": _LOGS, "solution": _SOLUTION}
    return _PLACE.sub(lambda found: places[found[1]], text)


def _number(content: bytes) -> float | None:
    """Return a reward from 0 to 1; None for anything else."""
    try:
        value = decode_json(content.strip())
    except msgspec.DecodeError:
        return None
    if isinstance(value, dict):
        value = value.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value <= 1 else None
