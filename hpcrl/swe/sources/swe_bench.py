"""Rows of SWE-bench, SWE-Gym (the same columns) and SWE-smith.

The repository of a row must have been made ready by the site: a directory or tar file, and an image or interpreter in
which its tests run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.swe.diffs import invert_diff, parse_diff
from hpcrl.swe.sources.columns import list_column, text_column
from hpcrl.swe.task import SweTask

ROW_PYTHON = ("python", "-s", "-B")
"""Interpreter of images: their packages are in its site directory. Their Python may be too old for ``-P``."""
_DIRECTORY = "/testbed"
_TIMEOUT_S = 1800.0


def swe_bench_task(row: Mapping[str, Any], tree: str) -> SweTask:
    """Return the task of a row of SWE-bench or SWE-Gym (RowError where a column is wrong).

    ``patch`` is the right result, ``test_patch`` changes tests, and FAIL_TO_PASS and PASS_TO_PASS are lists, also as
    JSON in a text.
    """
    tests = text_column(row, "test_patch", required=False)
    fail_to_pass = list_column(row, "FAIL_TO_PASS")
    return SweTask(
        id=text_column(row, "instance_id"),
        instruction=text_column(row, "problem_statement"),
        fail_to_pass=fail_to_pass,
        pass_to_pass=_others(list_column(row, "PASS_TO_PASS", required=False), fail_to_pass),
        tree=tree,
        image=text_column(row, "image_name", required=False),
        directory=_DIRECTORY,
        tests=tests,
        test_files=tuple(sorted({path for each in parse_diff(tests) for path in (each.old, each.new) if path})),
        solution=text_column(row, "patch", required=False),
        python=ROW_PYTHON,
        timeout_s=_TIMEOUT_S,
        source="swe-bench",
        package=text_column(row, "repo", required=False),
    )


def swe_smith_task(row: Mapping[str, Any], tree: str) -> SweTask:
    """Return the task of a row of SWE-smith (RowError where a column is wrong): ``patch`` is the bug."""
    bug = text_column(row, "patch")
    fail_to_pass = list_column(row, "FAIL_TO_PASS")
    return SweTask(
        id=text_column(row, "instance_id"),
        instruction=text_column(row, "problem_statement", required=False) or _instruction(fail_to_pass),
        fail_to_pass=fail_to_pass,
        pass_to_pass=_others(list_column(row, "PASS_TO_PASS", required=False), fail_to_pass),
        tree=tree,
        image=text_column(row, "image_name", required=False),
        directory=_DIRECTORY,
        bug=bug,
        solution=invert_diff(bug),
        python=ROW_PYTHON,
        timeout_s=_TIMEOUT_S,
        source="swe-smith",
        package=text_column(row, "repo", required=False),
    )


def _others(tests: tuple[str, ...], without: tuple[str, ...]) -> tuple[str, ...]:
    known = set(without)
    return tuple(test for test in tests if test not in known)


def _instruction(tests: tuple[str, ...]) -> str:
    """Return an instruction of a row that has none."""
    shown = "\n".join(f"- {test}" for test in tests[:8])
    return f"Some tests of this repository fail:\n\n{shown}\n\nFind the cause in the source code and mend it."
