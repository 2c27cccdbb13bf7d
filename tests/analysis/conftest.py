"""This file puts what tests of runs share (`runs_testing`) where tests here can import it, and has their fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))


@pytest.fixture
def hpcrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """Run a command line in this process; return its exit code and what it wrote to stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call
