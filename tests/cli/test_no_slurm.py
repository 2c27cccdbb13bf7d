"""A submit to a site with Slurm, from a machine that has none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from start_models import write_tiny_model

from hpcrl.cli.main import main


@pytest.mark.parametrize("option", [[], ["--queue-anyway"]])
def test_nothing_is_left_of_a_submit_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_model(tmp_path / "model")
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for command, code in (("submit", 2), ("status", 2)):
        settings = ["--cluster", "devcluster", "--name", "o1", "--set", f"model.path={tmp_path / 'model'}", *option]
        arguments = ["quickstart", *settings] if command == "submit" else ["o1"]
        monkeypatch.setattr(sys, "argv", ["hpcrl", command, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code
        said = capsys.readouterr().err
        assert ("is not on this machine" if command == "submit" else "there is no run o1") in said
    assert not list((tmp_path / "runs").glob("*"))
    assert not list((tmp_path / "runs").glob(".*"))
