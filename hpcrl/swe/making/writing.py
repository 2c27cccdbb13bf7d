"""From a version of a package whose tests fail to a task."""

from __future__ import annotations

import math
from pathlib import Path

from hpcrl.sandboxes.interface import DEFAULT_WORK_DIRECTORY
from hpcrl.swe.diffs import make_diff
from hpcrl.swe.judging.canaries import function_of, test_file_of
from hpcrl.swe.making.drawing import SeededVersion, drawn_share
from hpcrl.swe.making.measuring import MeasuredPackage
from hpcrl.swe.making.packages import SourcePackage
from hpcrl.swe.making.versions import VersionResult
from hpcrl.swe.task import SweTask
from hpcrl.swe.trees import Tree

_MAX_PASS_TO_PASS = 200
_MAX_FAIL_TO_PASS = 100
_MIN_MOST_FAILED = 40
_SHOWN = 8
_TIMEOUT_FACTOR = 20.0
_MIN_TIMEOUT_S = 120.0
_INSTRUCTION = """The repository in {directory} is the Python package {name} {version}. Some of its tests fail:

{failures}

Find the cause in the source code and mend it, so that these tests pass and all others still do. Changes of tests and of
configuration files do not count. `python3 -m pytest -p no:cacheprovider {file}` runs tests."""


def task_of(
    candidate: SeededVersion,
    result: VersionResult,
    *,
    package: SourcePackage,
    tree: Tree,
    digest: str,
    measured: MeasuredPackage,
    python: Path,
) -> SweTask | None:
    """Return the task of a candidate; None where no test fails, or nearly all do."""
    failed = [test for test in candidate.tests if result.outcomes.get(test, "F") != "P"]
    shown = [test for test in failed if test in result.outcomes]
    # where the package cannot be imported there is nothing to look for
    if not shown or len(failed) > most_failed(measured):
        return None
    name, version = package.pinned.name, package.pinned.version
    wrong = set(failed)
    near = [test for test in candidate.tests if test not in wrong]
    far = sorted((test for test in measured.tests if test not in wrong and test not in set(near)), key=drawn_share)
    before = {path: tree[path].content.decode() for path in candidate.changes}
    bug = make_diff(before, dict(candidate.changes))
    lines = [f"- {test}: {result.messages.get(test) or 'failed'}" for test in shown[:_SHOWN]]
    if len(failed) > _SHOWN:
        lines.append(f"- and {len(failed) - _SHOWN} more")
    instruction = _INSTRUCTION.format(
        directory=DEFAULT_WORK_DIRECTORY,
        name=name,
        version=version,
        failures="\n".join(lines),
        file=test_file_of(shown[0]),
    )
    return SweTask(
        id=f"{name}-{version}-{candidate.number}",
        instruction=instruction,
        fail_to_pass=tuple(failed[:_MAX_FAIL_TO_PASS]),
        pass_to_pass=tuple([*near, *far][:_MAX_PASS_TO_PASS]),
        tree=f"trees/{name}-{version}.tar",
        digest=digest,
        bug=bug,
        solution=make_diff(dict(candidate.changes), before),
        test_files=tuple(sorted({test_file_of(test) for test in measured.tests})),
        python=(str(python), "-P", "-s", "-S", "-B"),
        imports=package.imports,
        not_copied=tuple(each for each in measured.not_copied if each in {function_of(test) for test in failed + near}),
        timeout_s=max(_MIN_TIMEOUT_S, math.ceil(_TIMEOUT_FACTOR * measured.cpu_s)),
        difficulty=_difficulty(candidate.weight, len(failed)),
        source="hpcrl swe make",
        package=name,
        split=candidate.split,
    )


def most_failed(measured: MeasuredPackage) -> int:
    """Return the largest number of failing tests of a task."""
    return max(len(measured.tests) // 2, _MIN_MOST_FAILED)


def _difficulty(weight: int, failed: int) -> float:
    """Return 0 (easy) to 1: many edits are hard to find all, and few failing tests say little."""
    return round(0.5 * min(1.0, (weight - 1) / 3) + 0.5 / (1 + math.log2(failed)), 3)
