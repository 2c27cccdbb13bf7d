"""The environment and the runner of Slurm's commands, and what their errors mean."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patience, wait_for

from hpcrl.processes import procfs
from hpcrl.slurm.command import CommandResult, command_environment, run_command
from hpcrl.slurm.errors import (
    NoAccountingError,
    NoClusterError,
    NoSuchJobError,
    SlurmError,
    SlurmMissingError,
    SlurmRejectedError,
    SlurmUnavailableError,
    classify,
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("squeue: error: Unable to contact slurm controller (connect failure)", SlurmUnavailableError),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", SlurmUnavailableError),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", SlurmUnavailableError),
        (
            "sbatch: error: Batch job submission failed: Slurm temporarily unable to accept job, sleeping",
            SlurmUnavailableError,
        ),
        ("sacct: error: Problem talking to the database: Connection refused", SlurmUnavailableError),
        ('sinfo: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"', SlurmUnavailableError),
        ("slurm_load_jobs error: Invalid job id specified", NoSuchJobError),
        ("Slurm accounting storage is disabled", NoAccountingError),
        ("You are not running a supported accounting_storage plugin", NoAccountingError),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            SlurmRejectedError,
        ),
        ("squeue: fatal: Could not establish a configuration source", NoClusterError),
        ("", SlurmRejectedError),
    ],
)
def test_classification(text: str, kind: type[SlurmError]) -> None:
    error = classify(["squeue", "--jobs=1"], 1, text)
    assert type(error) is kind
    assert "squeue" in str(error)


# -- the real runner and its environment -----------------------------------------------------------------------------


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_ID", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SLURM_CONF", "HOME_OF_MINE", "SLURMD_NODENAME"):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("LC_ALL", raising=False)
    reading = command_environment(conf=None, reading=True)
    assert reading["SLURM_CONF"] == "x"
    assert reading["HOME_OF_MINE"] == "x"
    assert (reading["LC_ALL"], reading["SLURM_TIME_FORMAT"]) == ("C", "%s")
    assert not {"SLURM_JOB_ID", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SLURMD_NODENAME"} & set(reading)
    submitting = command_environment(conf=tmp_path, reading=False)
    assert submitting["SLURM_CONF"] == str(tmp_path)
    assert not {"LC_ALL", "SLURM_TIME_FORMAT"} & set(submitting), "the job would inherit them"


def test_runner() -> None:
    code = "import sys; print('out\\xff'); sys.stderr.write('err'); sys.exit(3)"
    result = run_command([sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "latin-1"}, timeout_s=30)
    assert result == CommandResult(3, "out\ufffd\n", "err")
    with pytest.raises(SlurmMissingError, match="devcluster"):
        run_command(["no-such-command"], env=os.environ, timeout_s=1)


def test_runner_kills_at_the_time_out(tmp_path: Path) -> None:
    """The command's own children, too: they hold the pipes."""
    pidfile = tmp_path / "pid"
    with pytest.raises(SlurmUnavailableError, match="no answer"):
        run_command(["sh", "-c", f"sleep 1000 & echo $! > {pidfile}; wait"], env=os.environ, timeout_s=patience())
    pid = int(pidfile.read_text())
    # nobody may have reaped it
    wait_for(lambda: (child := procfs.read_process(pid)) is None or child.dead, 5.0, "end of the child")


def test_an_interrupt_as_the_command_ends_is_reported_and_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of a command that was waited for may be another's by now."""
    ended: list[int] = []

    def interrupted(process: subprocess.Popen[str], timeout: float | None = None) -> None:
        process.wait(timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    monkeypatch.setattr("hpcrl.slurm.command.os.killpg", lambda pid, _: ended.append(pid))
    with pytest.raises(KeyboardInterrupt):
        run_command(["true"], env=os.environ, timeout_s=30)
    assert ended == []
