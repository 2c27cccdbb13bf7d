"""Lists are called ``list`` or ``ls``, whichever somebody tries first."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hpcrl.cli.main import app


@pytest.mark.parametrize("group", ["recipe", "cluster", "devcluster"])
def test_ls_is_list(group: str) -> None:
    shown = [CliRunner().invoke(app, [group, name]) for name in ("list", "ls")]
    assert [result.exit_code for result in shown] == [0, 0]
    assert shown[0].stdout == shown[1].stdout
    # one of them is enough in a list of commands
    assert " ls " not in CliRunner().invoke(app, [group, "--help"]).stdout
