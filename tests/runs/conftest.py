"""This file puts what the folders below share (`runs_testing`) where they can import it, and has their fixtures."""

from __future__ import annotations

import sys

import pytest
from runs_testing import Hpcrl

from hpcrl.cli.main import main


@pytest.fixture
def hpcrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hpcrl:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call
