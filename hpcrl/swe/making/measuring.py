"""Measuring a package before it gets bugs: which of its tests always pass, and which functions they call."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from hpcrl.errors import UsageError
from hpcrl.sandboxes import Patch
from hpcrl.swe.judging.canaries import function_of
from hpcrl.swe.judging.judge import SweJudge
from hpcrl.swe.judging.prepared import PreparedTask, module_names
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.making.packages import SourcePackage
from hpcrl.swe.making.versions import Version, run_versions
from hpcrl.swe.task import SweTask
from hpcrl.swe.trees import Tree

_RUNS = 3
"""Runs by the judge in which a test must pass."""
_WALL_S = 240.0


class MeasuredPackage(msgspec.Struct, frozen=True):
    """Measurements of the tests of a package.

    Attributes
    ----------
    tests:
        Ids that pass in every run.
    flaky:
        Ids that pass in some.
    not_copied:
        Tests of which copies with a false assertion pass all the same.
    callers:
        Positions in ``tests`` of those that call a function, by ``path:line``.
    imported:
        Functions that are called when the tests are imported.
    cpu_s:
        CPU seconds of all tests.
    """

    tests: list[str]
    flaky: list[str]
    not_copied: list[str]
    callers: dict[str, list[int]]
    imported: list[str]
    cpu_s: float


def base_task(package: SourcePackage, tree: Tree, tests: list[str], python: Path) -> PreparedTask:
    """Return a task with the unchanged package, all of whose tests are wanted."""
    task = SweTask(
        id=package.pinned.name,
        instruction="none",
        pass_to_pass=tuple(tests),
        imports=package.imports,
        package=package.pinned.name,
        python=(str(python), "-P", "-s", "-S", "-B"),
        timeout_s=_WALL_S,
    )
    return PreparedTask(task, tree, {}, {}, None, module_names(tree, package.imports))


async def measure_package(
    sandboxes: TaskSandboxes, package: SourcePackage, tree: Tree, python: Path
) -> MeasuredPackage:
    """Run the tests of an unchanged package: once to see what they call, and three times as the judge does.

    Raises
    ------
    UsageError
        No test passes.
    SandboxError
        The tests could not be run.
    """
    prepared = base_task(package, tree, [], python)
    version = Version(job=0, changes={}, files=package.tests, calls=True, cpu_s=_WALL_S)
    result = (await run_versions(sandboxes, prepared, [version], wall_s=_WALL_S)).get(0)
    first = [] if result is None else [test for test, outcome in result.outcomes.items() if outcome == "P"]
    if result is None or not first:
        raise UsageError(f"{package.pinned.name}: no test passes with {python}\n    hint: leave it out with --package")
    judge = SweJudge(sandboxes)
    passes: Counter[str] = Counter()
    not_copied: set[str] = set()
    prepared = base_task(package, tree, first, python)
    for _ in range(_RUNS):
        laid = judge.lay(prepared, every=True)
        records, _result = await judge.run_tests(prepared, Patch(), laid)
        if records.forged:
            what = f"{package.pinned.name}: its own tests look like tampering: {records.forged[0]}"
            raise UsageError(f"{what}\n    hint: leave it out with --package")
        passes.update(test for name, test in laid.real.items() if records.passed(name))
        not_copied |= {laid.copied[name] for name in laid.copied if records.outcomes.get(name) == "P"}
    tests = [test for test in first if passes[test] == _RUNS]
    numbers = {test: number for number, test in enumerate(tests)}
    callers: dict[str, list[int]] = {}
    for test, functions in result.called.items():
        for function in functions if test in numbers else ():
            callers.setdefault(function, []).append(numbers[test])
    return MeasuredPackage(
        tests=tests,
        flaky=[test for test in first if passes[test] != _RUNS],
        not_copied=sorted({function_of(test) for test in not_copied}),
        callers=callers,
        imported=result.called.get("", []),
        cpu_s=result.cpu_s,
    )
