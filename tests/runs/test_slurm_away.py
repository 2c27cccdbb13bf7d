"""Commands that need Slurm, where its configuration is not there or its controller does not answer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest
from runs_testing import make_run, write_status
from start_models import write_tiny_model

from hpcrl.cli.main import main
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

PROGRAMS = ("sbatch", "squeue", "sacct", "scancel", "srun", "scontrol")

SUBMIT = ["submit", "quickstart", "--cluster", "devcluster", "--set", "model.path=model"]
COMMANDS = {
    "submit": SUBMIT,
    "submit --queue-anyway": [*SUBMIT, "--queue-anyway"],
    "resume": ["resume", "run-1"],
    "cancel": ["cancel", "run-1", "--yes"],
    "requeue": ["requeue", "run-1", "--yes"],
    "shell": ["shell", "run-1", "--", "env"],
    "cluster init": ["cluster", "init", "mine"],
    "cluster check": ["cluster", "check", "devcluster"],
    "cluster check --job": ["cluster", "check", "devcluster", "--job"],
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A start model, a run that was submitted, and Slurm's commands, which note each call and reach nobody."""
    (tmp_path / "model").mkdir()
    write_tiny_model(tmp_path / "model")
    (tmp_path / "slurm.conf").write_text("ClusterName=gone\n")
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        program = tmp_path / "bin" / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $* with $SLURM_CONF" >> {tmp_path}/calls\n'
            "echo 'Unable to contact slurm controller' >&2; exit 1\n"
        )
        program.chmod(0o755)
    run = make_run(tmp_path / "runs")
    resubmit(run, executor="slurm", job_id="7", requeues=True, slurm_conf=str(tmp_path / "slurm.conf"))
    write_status(run, RunState.RUNNING)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setattr(os, "execvpe", lambda *arguments: pytest.fail("the shell was begun"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resubmit(run: RunDir, **changes: object) -> None:
    record = RunRecord.read(run)
    submission = msgspec.structs.replace(record.submissions[-1], **changes)
    msgspec.structs.replace(record, submissions=[submission]).write(run)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """What a command says that ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    return said


def calls(site: Path) -> list[str]:
    written = site / "calls"
    return written.read_text().splitlines() if written.exists() else []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_controller_that_is_away_is_asked_once_and_named_with_a_hint(
    command: str, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, COMMANDS[command])
    assert "Slurm's controller does not answer; nothing was changed" in said
    assert "hint: try again later" in said
    # a file of another cluster is one reason; words may be wrapped
    assert f"hint:SLURM_CONFis{site}/slurm.conf:" in "".join(said.split())
    # ping says at once what every other command takes nine seconds for, or thirty
    assert calls(site) == [f"scontrol ping with {site}/slurm.conf"]
    assert [path.name for path in (site / "runs").iterdir()] == ["run-1"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_configuration_is_named_and_no_command_is_run(
    command: str, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/gone/slurm.conf")
    resubmit(RunDir(site / "runs/run-1"), slurm_conf="/gone/slurm.conf")
    said = refused(monkeypatch, capsys, COMMANDS[command])
    assert "SLURM_CONF is /gone/slurm.conf, which does not exist" in said
    assert "hint: unset SLURM_CONF" in said
    assert calls(site) == []
    assert [path.name for path in (site / "runs").iterdir()] == ["run-1"]


def test_readers_of_a_run_say_in_one_line_why_its_job_is_not_known(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resubmit(RunDir(site / "runs/run-1"), slurm_conf="/gone/slurm.conf")
    for command in ("status", "ls", "why"):
        monkeypatch.setattr(sys, "argv", ["hpcrl", command, *(["run-1"] if command != "ls" else [])])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        said = capsys.readouterr().out
        assert "run-1" in said
        if command == "status":
            assert "SLURM_CONF is /gone/slurm.conf, which does not exist" in " ".join(said.split())
    assert calls(site) == []


def test_a_run_with_a_recorded_end_needs_no_slurm(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(RunDir(site / "runs/run-1"), RunState.COMPLETED)
    assert "has ended already (COMPLETED)" in refused(monkeypatch, capsys, COMMANDS["cancel"])
    assert "has ended (COMPLETED)" in refused(monkeypatch, capsys, COMMANDS["shell"])
    assert calls(site) == []
