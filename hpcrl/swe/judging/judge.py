"""The judge: runs the tests of a task on the result of an agent, in a fresh sandbox, and decides on the reward.

The sandbox gets the repository as the task has it, the changes of the agent that count (`paths`), and the tests of the
task under random names with canaries between them (`canaries`). A program of hpcrl runs them and signs each result
(`program`, `records`). A test without a result has failed. If the sandbox itself fails, there is no result: it raises.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.sandboxes import ExecResult, Patch, Sandbox, SandboxError, SandboxLimitError
from hpcrl.swe.judging.canaries import LaidTests, lay_tests, test_file_of
from hpcrl.swe.judging.paths import counted_changes
from hpcrl.swe.judging.prepared import TOOLS, PreparedTask, changes_of
from hpcrl.swe.judging.records import RunRecords, read_verdicts
from hpcrl.swe.judging.script import run_script
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes, inside

_log = logging.getLogger(__name__)

_PROGRAM = (Path(__file__).parent / "program.py").read_bytes()
_MAX_OUTPUT = 64 << 20
_FAILED_TESTS = 1
"""Exit code of pytest where a test has failed; canaries always fail."""
_SHOWN = 3
_SHOWN_CHARACTERS = 300


class JudgeFailedError(SandboxError):
    """The tests of a task could not be run, whatever the agent did; its rollout gets no reward."""


@dataclass(frozen=True, slots=True)
class SweVerdict:
    """Judgement on the result of an agent.

    Attributes
    ----------
    reward:
        1 where all tests of the task pass, and nothing was tampered with; otherwise 0. Of a task with a script, what
        the script says, from 0 to 1.
    fail_to_pass, pass_to_pass:
        Shares of the tests that pass, 0 to 1; 1 where there are none.
    tampered:
        The tested code interfered with the tests.
    why:
        Reason that the reward is not 1; empty where it is.
    refused:
        Changes that did not count, with the reason.
    wall_s:
        Seconds that the tests took.
    """

    reward: float
    fail_to_pass: float
    pass_to_pass: float
    tampered: bool = False
    why: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0


class SweJudge:
    """Judges results of agents."""

    def __init__(self, sandboxes: TaskSandboxes) -> None:
        """Remember what starts sandboxes."""
        self._sandboxes = sandboxes

    async def judge(self, prepared: PreparedTask, patch: Patch) -> SweVerdict:
        """Run the tests on an agent's changes and return the verdict.

        Parameters
        ----------
        patch:
            All changes of the work tree against ``prepared.tree``, as `Sandbox.diff` gives them.

        Raises
        ------
        SandboxError
            The tests could not be run, so there is no result.
        """
        task = prepared.task
        counted, refused = counted_changes(
            patch,
            test_files=task.test_files,
            roots=task.imports,
            modules=prepared.modules,
        )
        if task.verifier == "script":
            return await self._judge_by_script(prepared, counted, refused)
        laid = self.lay(prepared)
        try:
            records, result = await self.run_tests(prepared, counted, laid)
        except SandboxLimitError as error:
            return SweVerdict(0.0, 0.0, 0.0, why=f"the changes are too large: {error}", refused=refused)
        verdict = _verdict(prepared, laid, records, result, refused)
        if verdict.tampered:
            _log.warning("task %s: judge_tampered: %s", task.id, verdict.why)
        return verdict

    async def _judge_by_script(self, prepared: PreparedTask, patch: Patch, refused: dict[str, str]) -> SweVerdict:
        """Believe the script of a task; without its reward find out whether that is the agent's fault."""
        try:
            reward, result = await run_script(self._sandboxes, prepared, patch)
        except SandboxLimitError as error:
            return SweVerdict(0.0, 0.0, 0.0, why=f"the files are too large: {error}", refused=refused)
        why = "" if reward == 1 else "the script"
        if reward is None:
            ended = f"limit of {result.killed_by}" if result.killed_by else f"exit code {result.rc}"
            why = f"the script has left no reward ({ended})"
            if result.killed_by is None:
                await self._try_script(prepared)
        value = reward or 0.0
        return SweVerdict(value, value, 1.0, why=why, refused=refused, wall_s=result.wall_s)

    async def _try_script(self, prepared: PreparedTask) -> None:
        """Run the script of a task without an agent, once (JudgeFailedError where it leaves no reward then either)."""
        task = prepared.task
        if task.id in self._sandboxes.scripts_that_work:
            return
        reward, result = await run_script(self._sandboxes, prepared, prepared.start_patch)
        if reward is None:
            last = " ".join(result.text.split())[-_SHOWN_CHARACTERS:]
            what = f"task {task.id!r}: its script leaves no reward, without an agent neither"
            what += f" (exit code {result.rc}): {last}"
            raise JudgeFailedError(f"{what}\n    hint: are its programs in the image? There is no network")
        self._sandboxes.scripts_that_work.add(task.id)

    def lay(self, prepared: PreparedTask, *, every: bool = False) -> LaidTests:
        """Give the tests of a task random names, and add canaries (of each test that can be copied: ``every``)."""
        task = prepared.task
        tests = (*task.fail_to_pass, *task.pass_to_pass)
        return lay_tests(
            prepared.test_texts(),
            tests,
            first=task.fail_to_pass,
            without=task.not_copied,
            rng=random.SystemRandom(),
            rename=task.rename,
            every=every,
        )

    async def run_tests(
        self, prepared: PreparedTask, patch: Patch, laid: LaidTests, *, messages: bool = False
    ) -> tuple[RunRecords, ExecResult]:
        """Run tests on a patched tree in a fresh sandbox.

        Parameters
        ----------
        patch:
            Changes against ``prepared.tree``, all of which are made.
        messages:
            Report the first lines of failures.

        Raises
        ------
        SandboxError
            They could not be run.
        """
        task = prepared.task
        key = secrets.token_bytes(32)
        tests = [*laid.real, *laid.canaries]
        random.SystemRandom().shuffle(tests)
        sandbox = await self._sandboxes.start(prepared)
        try:
            await sandbox.apply(patch)
            # the tests come last: nothing that the agent left can stand in their place
            await sandbox.apply(changes_of(prepared.tree, prepared.laid))
            await sandbox.put({path: text.encode() for path, text in laid.files.items()})
            result = await _run_program(sandbox, prepared, tests, key, messages=messages)
        finally:
            await sandbox.kill()
        records = read_verdicts(result.out, key, tests)
        if not records.started:
            what = f"task {task.id!r}: the tests could not be started (exit code {result.rc}): {records.head.strip()}"
            hint = f"try {task.python[0]} with pytest in the sandbox: hpcrl swe check"
            raise JudgeFailedError(f"{what}\n    hint: {hint}")
        return records, result


async def _run_program(
    sandbox: Sandbox, prepared: PreparedTask, tests: Sequence[str], key: bytes, *, messages: bool
) -> ExecResult:
    """Send the program and its request to the interpreter of the sandbox."""
    task = prepared.task
    request = {
        "key": key.hex(),
        "tests": tests,
        "files": sorted({test_file_of(test) for test in tests}),
        "tools": [f"{task.directory}/{TOOLS}"] if TOOLS in prepared.tree else [],
        "imports": [inside(task.directory, root) for root in task.imports],
        "arguments": [
            *("-p", "no:cacheprovider", "-p", "no:faulthandler", "-c", "/dev/null"),
            *("--rootdir", task.directory, "--tb", "short" if messages else "no", "-q", *task.arguments),
        ],
        "messages": messages,
    }
    # in a namespace of its own: the tested code does not find it as `__main__`
    program = f"compile(sys.stdin.buffer.read({len(_PROGRAM)}), 'judge', 'exec')"
    # the current directory is the work tree: without -P Python would look there for the imports of the program itself
    start = f"import sys; sys.path[:] = filter(None, sys.path); exec({program}, {{'__name__': '__main__'}})"
    return await sandbox.exec(
        [*task.python, "-c", start],
        stdin=_PROGRAM + msgspec.json.encode(request),
        timeout_s=task.timeout_s,
        max_output=_MAX_OUTPUT,
        env={"PYTHONPATH": ""},
    )


def _verdict(
    prepared: PreparedTask, laid: LaidTests, records: RunRecords, result: ExecResult, refused: dict[str, str]
) -> SweVerdict:
    """Decide on records of a run."""
    task = prepared.task
    tampering = list(records.forged)
    tampering += [f"{test}, which must fail, has passed" for test in laid.canaries if records.outcomes.get(test) == "P"]
    if records.code is not None and result.rc != records.code:
        tampering.append(f"the run announced the exit code {records.code}, and ended with {result.rc}")
    run_id = {test: name for name, test in laid.real.items()}
    failed = [test for test in (*task.fail_to_pass, *task.pass_to_pass) if not records.passed(run_id[test])]

    def share(tests: Sequence[str]) -> float:
        return 1 - len([test for test in tests if test in bad]) / len(tests) if tests else 1.0

    bad = set(failed)
    why = ""
    if tampering:
        why = "; ".join(tampering[:_SHOWN])
    elif records.code is None:
        ended = f"killed by its limit ({result.killed_by})" if result.killed_by else f"exit code {result.rc}"
        why = f"the run of the tests did not come to its end: {ended}"
    elif records.code != _FAILED_TESTS or not any(records.outcomes.get(test) == "F" for test in laid.canaries):
        why = f"no canary has failed (exit code {records.code})"
    elif failed:
        why = f"{len(failed)} tests fail: {', '.join(failed[:_SHOWN])}"
    return SweVerdict(
        reward=0.0 if why else 1.0,
        fail_to_pass=share(task.fail_to_pass),
        pass_to_pass=share(task.pass_to_pass),
        tampered=bool(tampering),
        why=why,
        refused=refused,
        wall_s=result.wall_s,
    )
