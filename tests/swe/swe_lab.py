"""A small repository with a bug, for tests of tasks and their judge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.sandboxes import Patch, PatchEntry, SandboxFile
from hpcrl.swe.diffs import make_diff
from hpcrl.swe.judging.prepared import TOOLS, PreparedTask
from hpcrl.swe.task import SweTask

PYTHON = Path("/usr/bin/python3")
PACKAGE = "lengths"
GOOD = '''"""Lengths."""

import re

UNITS = {"m": 1.0, "km": 1000.0, "cm": 0.01}


def parse(text):
    """Return metres."""
    match = re.fullmatch(r"(-?[0-9.]+) *([a-z]+)", text)
    if match is None:
        raise ValueError(text)
    return float(match[1]) * UNITS[match[2]]


def total(texts):
    """Return the sum in metres."""
    result = 0.0
    for text in texts:
        result += parse(text)
    return result


def name(value):
    """Return the largest unit that the value fills."""
    if value >= 1000:
        return "km"
    return "m" if value >= 1 else "cm"
'''
BAD = GOOD.replace("result += parse", "result -= parse").replace("value >= 1000", "value > 1000")
TESTS = """import unittest

import pytest

from lengths import name, parse, total


def test_parse():
    assert parse("2 km") == 2000.0


def test_total():
    assert total(["1 m", "2 m"]) == 3.0


def test_total_of_nothing():
    assert total([]) == 0.0


@pytest.mark.parametrize(("value", "unit"), [(1000, "km"), (5, "m"), (0.5, "cm")])
def test_name(value, unit):
    assert name(value) == unit


def test_refused():
    with pytest.raises(ValueError):
        parse("long")


class TotalTest(unittest.TestCase):
    def test_two(self):
        self.assertEqual(total(["1 km", "1 km"]), 2000.0)

    def test_units(self):
        self.assertTrue(name(2) == "m")
"""
CONFTEST = "import pytest\n"
FAIL_TO_PASS = (
    "tests/test_lengths.py::test_total",
    "tests/test_lengths.py::test_name[1000-km]",
    "tests/test_lengths.py::TotalTest::test_two",
)
PASS_TO_PASS = (
    "tests/test_lengths.py::test_parse",
    "tests/test_lengths.py::test_total_of_nothing",
    "tests/test_lengths.py::test_name[5-m]",
    "tests/test_lengths.py::test_name[0.5-cm]",
    "tests/test_lengths.py::test_refused",
    "tests/test_lengths.py::TotalTest::test_units",
)
SOURCE = "src/lengths/__init__.py"
TREE = {
    SOURCE: GOOD,
    "src/lengths/more.py": "",
    "tests/test_lengths.py": TESTS,
    "tests/conftest.py": CONFTEST,
    "README.md": "Lengths\n",
}


def make_task(**changes: Any) -> SweTask:
    """Return the task of the small repository."""
    given = {
        "id": "lengths-1",
        "tree": "trees/lengths.tar",
        "instruction": "mend total and name",
        "fail_to_pass": FAIL_TO_PASS,
        "pass_to_pass": PASS_TO_PASS,
        "bug": make_diff({SOURCE: GOOD}, {SOURCE: BAD}),
        "solution": make_diff({SOURCE: BAD}, {SOURCE: GOOD}),
        "imports": ("src",),
        "timeout_s": 60.0,
    }
    return SweTask(**{**given, **changes})


def make_tree(tools: bytes, **more: str) -> dict[str, SandboxFile]:
    """Return the small repository without its bug."""
    tree = {path: SandboxFile(text.encode()) for path, text in {**TREE, **more}.items()}
    return {**tree, TOOLS: SandboxFile(tools)}


def changes(prepared: PreparedTask, files: Mapping[str, str | bytes | SandboxFile | None]) -> Patch:
    """Return what an agent has changed: the bug that it found, and its own files."""
    entries = {entry.path: entry for entry in prepared.start_patch.entries}
    for path, given in files.items():
        after = given if given is None or isinstance(given, SandboxFile) else SandboxFile(_bytes(given))
        entries[path] = PatchEntry(path, prepared.tree.get(path), after)
    return Patch(tuple(entries[path] for path in sorted(entries)))


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
