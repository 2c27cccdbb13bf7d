"""Rows of R2E-Gym.

A row names results by class and function (``TestA.test_b``), and has the text of its test files. The files are laid as
``r2e_tests/NAME``, where the data set's own images have them, and each result is looked for in them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from hpcrl.swe.diffs import make_diff
from hpcrl.swe.sources.columns import RowError, json_column, text_column
from hpcrl.swe.sources.swe_bench import ROW_PYTHON
from hpcrl.swe.task import SweTask

_TESTS = "r2e_tests"
_SUMMARY = "short test summary info"


def r2e_gym_task(row: Mapping[str, Any], tree: str) -> SweTask:
    """Return the task of a row of R2E-Gym (RowError where a column is wrong)."""
    expected = json_column(row, "expected_output_json")
    content = json_column(row, "execution_result_content")
    if not isinstance(expected, dict) or not expected:
        raise RowError("the column 'expected_output_json' is not a mapping of tests to results")
    if not isinstance(content, dict):
        raise RowError("the column 'execution_result_content' is not a mapping")
    files = _files(content)
    before = _passed(str(content.get("old_commit_res_stdout") or ""))
    places = _places(files)
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    for name, status in expected.items():
        if status != "PASSED":
            continue
        function = name.partition("[")[0]
        if function not in places:
            raise RowError(f"no test file of the row has the test {name!r}")
        test = f"{_TESTS}/{places[function]}::{function.replace('.', '::')}{name[len(function) :]}"
        (pass_to_pass if name in before else fail_to_pass).append(test)
    repository, commit = text_column(row, "repo_name"), text_column(row, "commit_hash")
    return SweTask(
        id=f"{repository}-{commit}",
        instruction=text_column(row, "problem_statement"),
        fail_to_pass=tuple(fail_to_pass),
        pass_to_pass=tuple(pass_to_pass),
        tree=tree,
        image=text_column(row, "docker_image", required=False),
        directory="/testbed",
        tests=make_diff({}, {f"{_TESTS}/{name}": text for name, text in files.items()}),
        test_files=tuple(f"{_TESTS}/{name}" for name in files),
        python=ROW_PYTHON,
        timeout_s=1800.0,
        source="r2e-gym",
        package=repository,
    )


def _files(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of the test files of a row by name."""
    names, texts = content.get("test_file_names"), content.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(texts, list) or len(names) != len(texts) or not names:
        raise RowError("'execution_result_content' has no test_file_names with test_file_codes")
    for name, text in zip(names, texts, strict=True):
        if not isinstance(name, str) or not isinstance(text, str) or "/" in name or not name.endswith(".py"):
            raise RowError(f"'execution_result_content' has a test file that cannot be used: {name!r}")
    return dict(zip(names, texts, strict=True))


def _places(files: Mapping[str, str]) -> dict[str, str]:
    """Return the file of each test, named ``Class.function``."""
    found: dict[str, str] = {}

    def walk(body: list[ast.stmt], prefix: str, file: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.", file)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(f"{prefix}{node.name}", file)

    for name, text in files.items():
        try:
            walk(ast.parse(text).body, "", name)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise RowError(f"the test file {name!r} is not valid Python: {error}") from None
    return found


def _passed(log: str) -> set[str]:
    """Return the tests that a log of pytest reports as passed."""
    _, found, summary = log.partition(_SUMMARY)
    if not found:
        return set()
    lines = [line.split() for line in summary.splitlines()]
    return {".".join(words[1].split("::")[1:]) for words in lines if len(words) > 1 and words[0] == "PASSED"}
