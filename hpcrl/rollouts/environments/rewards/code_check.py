"""Programs of a policy, run in sandboxes against the tests of a row.

Inputs and outputs: each input is given to a process of its own, and what it prints is compared here, so that the
sandbox never has an expected output. Assert lines and calls of a function: see
`hpcrl.rollouts.environments.rewards.code_judge`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from pathlib import Path
from typing import Any

from hpcrl.config.rewards import CodeReward
from hpcrl.rollouts.environments.rewards.code_judge import LOADER
from hpcrl.rollouts.environments.rewards.code_tests import CodeTests, program_of, read_code_tests, same_output
from hpcrl.rollouts.environments.sandbox_limits import sandbox_limits
from hpcrl.sandboxes import ExecResult, Sandbox, SandboxError, SandboxHost
from hpcrl.sandboxes.on_demand import SandboxesOnDemand
from hpcrl.swe.judging.records import read_verdicts

_ROOM = "hpcrl.rollouts.environments.rewards"
_NAMES = ("code_values", "code_compare", "code_host", "code_judge")
_VALUES, _COMPARE, _HOST, _JUDGE = (
    (f"{_ROOM}.{name}", (Path(__file__).parent / f"{name}.py").read_text()) for name in _NAMES
)
_START = f"{LOADER}given = json.loads(sys.stdin.buffer.read())\nload(given['judge']).run_tests(given)\n"
_USUAL = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
_BEFORE_FUNCTIONS = "\n".join(
    # modules and builtins last: some modules have a function of the name of either
    [f"from {each} import *" for each in _USUAL]
    + [f"import {each}" for each in _USUAL]
    + ["from builtins import *", "sys.setrecursionlimit(50000)"]
)
"""Runs before a program with a tested function, as in the graders of APPS and LiveCodeBench: the beginnings of programs
that their questions give use ``List`` and others without an import."""
_FILE = "program.py"
_SLACK_BYTES = 64 << 10
"""Bytes that a program may print more than is expected: blanks, for example."""
_MAX_RECORDS = 64 << 20
_PROBE_S = 60.0
_SILENT = ("/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh")
"""Starts a program without its standard error, which would be among its output."""


class CodeNotRunError(SandboxError):
    """The tests could not be run, whatever the program does; its rollout gets no reward."""


class CodeCheck:
    """Runs programs."""

    def __init__(self, config: CodeReward) -> None:
        """Prepare; no sandbox is started."""
        self._config, self._probed = config, False
        self._sandboxes: SandboxesOnDemand[SandboxHost] = SandboxesOnDemand(lambda host: host)
        # one loop for all calls: the connection with the daemon of sandboxes belongs to it
        self._runner = asyncio.Runner()

    def answer_problem(self, answer: str) -> str:
        return ""

    def score(self, reply: str, answer: str, row: dict[str, Any]) -> float:
        """Judge a reply (see `hpcrl.rollouts.environments.rewards.slow.SlowCheck`).

        Raises
        ------
        SandboxError
            The tests could not be run, so there is no score.
        """
        tests = read_code_tests(self._config, row)
        program = program_of(reply, self._config.extract)
        if not program.strip():
            return 0.0
        passed = self._runner.run(self._passed(program, tests))
        count = len(tests.asserts) + len(tests.pairs) + len(tests.calls)
        return passed / count if self._config.score == "share" else float(passed == count)

    def close(self) -> None:
        """End its sandboxes."""
        self._runner.run(self._sandboxes.aclose())
        self._runner.close()

    async def _passed(self, program: str, tests: CodeTests) -> int:
        """Return the number of tests that pass."""
        config = self._config
        _, sandbox = await self._sandboxes.start(
            lambda host: host.start(image=config.image, mounts=config.mounts, limits=sandbox_limits(config))
        )
        try:
            if tests.pairs:
                await self._probe(sandbox)
            deadline = time.monotonic() + config.timeout_s
            passed = 0
            if tests.asserts or tests.calls:
                passed = await self._run_judge(sandbox, program, tests)
            if tests.pairs and (config.score == "share" or passed == len(tests.calls)):
                passed += await self._run_pairs(sandbox, program, tests.pairs, deadline)
            return passed
        finally:
            await sandbox.kill()

    async def _run_pairs(
        self, sandbox: Sandbox, program: str, pairs: tuple[tuple[str, str], ...], deadline: float
    ) -> int:
        await sandbox.put({_FILE: program.encode("utf-8", "replace")})
        passed = 0
        for given, expected in pairs:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            most = len(expected.encode("utf-8", "replace")) + _SLACK_BYTES
            result = await self._run(sandbox, given, timeout_s=min(self._config.test_timeout_s, left), max_output=most)
            ended = result.rc == 0 and result.killed_by is None and not result.truncated
            if ended and same_output(result.text, expected):
                passed += 1
            elif self._config.score == "all":
                break
        return passed

    async def _run(self, sandbox: Sandbox, given: str, *, timeout_s: float, max_output: int = 4096) -> ExecResult:
        return await sandbox.exec(
            [*_SILENT, *self._config.interpreter, _FILE],
            stdin=given.encode("utf-8", "replace"),
            timeout_s=timeout_s,
            max_output=max_output,
        )

    async def _probe(self, sandbox: Sandbox) -> None:
        """Run an empty program once: a policy does not fail because an interpreter is missing."""
        if self._probed:
            return
        await sandbox.put({_FILE: b"\n"})
        result = await self._run(sandbox, "", timeout_s=_PROBE_S)
        if result.rc or result.killed_by:
            raise self._not_run(result)
        self._probed = True

    async def _run_judge(self, sandbox: Sandbox, program: str, tests: CodeTests) -> int:
        """Return the number of assert lines or calls that pass."""
        key = secrets.token_bytes(32)
        config = self._config
        request = {
            "judge": [_VALUES, _COMPARE, _JUDGE],
            "modules": [_VALUES, _HOST],
            "key": key.hex(),
            "tests": tests.asserts,
            "calls": [(each.arguments, each.expected, each.encoded, each.wrapped) for each in tests.calls],
            "texts": [each for each in (*_imports(tests), tests.before, program, tests.setup) if each],
            "entry_point": tests.entry_point,
            "test_timeout_s": config.test_timeout_s,
            "every": config.score == "share",
        }
        result = await sandbox.exec(
            # isolated: no module of the program's directory is imported by the judge
            [*config.interpreter, "-I", "-c", _START],
            stdin=json.dumps(request).encode(),
            timeout_s=config.timeout_s,
            max_output=_MAX_RECORDS,
        )
        names = [str(number) for number in range(len(tests.asserts) + len(tests.calls))]
        records = read_verdicts(result.out, key, names)
        if not records.started:
            raise self._not_run(result)
        if records.messages:
            number, what = next(iter(records.messages.items()))
            raise CodeNotRunError(f"test {int(number) + 1} gives the program a {what}; it can be given plain data only")
        return sum(outcome == "P" for outcome in records.outcomes.values())

    def _not_run(self, result: ExecResult) -> CodeNotRunError:
        said = f"exit code {result.rc}" if result.killed_by is None else f"limit of {result.killed_by}"
        what = f"{' '.join(self._config.interpreter)} does not run in a sandbox ({said}): {result.text.strip()[-300:]}"
        return CodeNotRunError(f"{what}\n    hint: see interpreter, image and mounts")


def _imports(tests: CodeTests) -> tuple[str, ...]:
    """Return code that runs before a program with a tested function.

    The function itself must come from the program: modules have a ``gcd`` and a ``permutations`` of their own.
    """
    return (_BEFORE_FUNCTIONS, f"globals().pop({tests.entry_point!r}, None)\n") if tests.calls else ()
