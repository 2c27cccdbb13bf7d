"""Runs of the tests of many versions of a repository: the generator's side of its program in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.sandboxes import SandboxError
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.swe.judging.prepared import TOOLS, PreparedTask
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes, inside

_PROGRAM = (Path(__file__).parent / "program.py").read_bytes()
_MAX_OUTPUT = 256 << 20


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a repository, and what is run of its tests.

    Attributes
    ----------
    job:
        Number of the version.
    changes:
        Text of the files that differ from the repository, by path.
    files:
        Files and directories that pytest is given.
    tests:
        Ids of the tests that are run; None: all of them.
    cpu_s:
        CPU seconds that they may take.
    max_failed:
        Failures after which no more tests are run; 0: no limit.
    calls:
        Report which functions each test calls.
    keep_compiled:
        Keep compiled modules and tests for the next versions.
    """

    job: int
    changes: Mapping[str, str]
    files: Sequence[str]
    tests: Sequence[str] | None = None
    cpu_s: float = 60.0
    max_failed: int = 0
    calls: bool = False
    keep_compiled: bool = False


class VersionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of the tests of one version.

    Attributes
    ----------
    code:
        Exit code of pytest.
    outcomes:
        ``P``, ``F`` or ``S`` by test.
    messages:
        First lines of failures, by test.
    called:
        Functions (``path:line``) by the test that calls them; an empty name stands for imports.
    cpu_s:
        CPU seconds that it took.
    """

    job: int
    code: int
    outcomes: dict[str, str]
    messages: dict[str, str]
    called: dict[str, list[str]]
    cpu_s: float


async def run_versions(
    sandboxes: TaskSandboxes, prepared: PreparedTask, versions: Sequence[Version], *, wall_s: float
) -> dict[int, VersionResult]:
    """Run versions one after the other in one sandbox.

    Parameters
    ----------
    wall_s:
        Seconds after which one version is given up, whatever CPU time it has used.

    Returns
    -------
    dict
        Results by number, without those of versions that did not come to their end.

    Raises
    ------
    SandboxError
        The program could not be run.
    """
    task = prepared.task
    request = {
        "directory": task.directory,
        "tools": [f"{task.directory}/{TOOLS}"] if TOOLS in prepared.tree else [],
        "imports": [inside(task.directory, root) for root in task.imports],
        "arguments": [
            *("-p", "no:cacheprovider", "-p", "no:faulthandler", "-c", "/dev/null"),
            *("--rootdir", task.directory, "--tb", "no", "-q"),
        ],
        "timeout_s": wall_s,
        "jobs": versions,
    }
    program = f"compile(sys.stdin.buffer.read({len(_PROGRAM)}), 'versions', 'exec')"
    start = f"import sys; exec({program}, {{'__name__': '__main__'}})"
    python = [option for option in task.python if option != "-B"]
    sandbox = await sandboxes.start(prepared)
    try:
        result = await sandbox.exec(
            [*python, "-c", start],
            stdin=_PROGRAM + msgspec.json.encode(request),
            timeout_s=60 + (wall_s + 1) * len(versions),
            max_output=_MAX_OUTPUT,
            env={"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""},
        )
    finally:
        await sandbox.kill()
    found: dict[int, VersionResult] = {}
    ended = False
    for line in result.out.splitlines():
        try:
            message: dict[str, Any] = decode_json(line)
            ended = ended or "end" in message
            if "outcomes" in message:
                one = msgspec.convert(message, VersionResult)
                found[one.job] = one
        except (msgspec.DecodeError, msgspec.ValidationError, TypeError):
            continue
    if not ended:
        head = result.text[:500]
        raise SandboxError(f"the versions of {task.package} could not be run (exit code {result.rc}): {head}")
    return found
