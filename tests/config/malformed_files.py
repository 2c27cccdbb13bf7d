"""Shared parts of the tests of malformed files: a good recipe, a case, and the check of its message."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest

from hpcrl.cli.main import main

RECIPE = """\
name: good
model:
  path: models/good
  warmup: {num_experts: 8}
environments:
  - name: words
    kind: words
trainer:
  steps: 10
"""


class Case(NamedTuple):
    """What is replaced in the good file, and what the error must say."""

    old: str
    new: str
    line: int
    key: str
    says: str
    hint: str


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return int(exit_info.value.code or 0)


def edited(good: str, case: Case) -> str:
    assert case.old in good
    return good.replace(case.old, case.new, 1)


def check_message(capsys: pytest.CaptureFixture[str], code: int, start: str, case: Case) -> None:
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    line = next(line for line in err.splitlines() if start in line)
    assert case.says in line
    assert case.hint in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 24
