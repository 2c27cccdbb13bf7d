"""Sweeps on a real Slurm: heterogeneous jobs in chains, of which Slurm itself starts a few at a time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import wait_for
from slurm_lab import PROBES, SlurmLab, job_id

from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus
from hpcrl.sweeps.sweep_files import SweepDir

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

ENDS = ["COMPLETED", "FAILED", "LOST", "CANCELLED"]
GRID = ("--grid", "trainer.optimizer.learning_rate=1e-4,2e-4", "--seeds", "2")
#: ends the process that submits a sweep when two members have their jobs, and the second one's is not on record
KILLED = """
import os, signal, sys
from hpcrl.submit import jobs
write = jobs.write_submission

def record(run, record):
    if run.name.endswith("-02"):
        os.kill(os.getpid(), signal.SIGKILL)
    write(run, record)

jobs.write_submission = record
from hpcrl.cli.main import main
sys.argv[0] = "hpcrl"
main()
"""


#: an sbatch that takes two jobs while a file is there
REFUSING = """#!/bin/bash
case "$*" in *--test-only*) exec {sbatch} "$@" ;; esac
if [ -e {limit} ] && [ "$(wc -l < {limit})" -ge 2 ]; then
    echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
    exit 1
fi
[ -e {limit} ] && echo job >> {limit}
exec {sbatch} "$@"
"""


def submit(lab: SlurmLab, name: str, *options: str) -> list[RunDir]:
    lab.hpcrl(*words(lab, name, *options))
    return runs(lab, name)


def words(lab: SlurmLab, name: str, *options: str) -> list[str]:
    sets = [part for setting in (*PROBES, "job.layout=hetjob") for part in ("--set", setting)]
    return ["submit", "quickstart", "--cluster", str(lab.profile), "--name", name, *sets, *options]


def runs(lab: SlurmLab, name: str) -> list[RunDir]:
    sweep = SweepDir.below(lab.runs_root, name)
    return [sweep.run_of(member) for member in sweep.read().members]


def queue_of(lab: SlurmLab) -> dict[int, tuple[str, str]]:
    """State and dependency of each job, by the id of its leader; a job of several components has one line each."""
    command = ["squeue", "--noheader", "--format=%A|%T|%E"]
    text = subprocess.run(command, env=lab.env, capture_output=True, text=True, check=True).stdout
    found: dict[int, tuple[str, str]] = {}
    for line in text.splitlines():
        number, state, dependency = line.strip().split("|")
        found[int(number)] = (state, dependency)
    return found


def test_chains_keep_the_limit_and_a_cancel_ends_all_of_them(probe_lab: SlurmLab) -> None:
    lab = probe_lab
    members = submit(lab, "s", *GRID, "--max-running", "2")
    jobs = [job_id(run) for run in members]
    for run in members[:2]:
        lab.wait_state(run, ["RUNNING", *ENDS])
    found = queue_of(lab)
    assert [found[job][0] for job in jobs] == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    assert [f"afterany:{before}" in found[job][1] for job, before in zip(jobs[2:], jobs[:2], strict=True)] == [True] * 2
    table = lab.hpcrl("sweep", "status", "s").stdout
    assert "2 RUNNING, 2 SUBMITTED" in table
    # one that ends makes room for the next of its chain alone
    lab.hpcrl("cancel", "s-01", "--yes")
    lab.wait_state(members[2], ["RUNNING", *ENDS])
    assert queue_of(lab)[jobs[3]][0] == "PENDING"
    lab.hpcrl("submit", *words(lab, "last", "--after", "s-04")[1:])
    last = job_id(RunDir(lab.runs_root / "last"))
    assert f"afterany:{jobs[3]}" in queue_of(lab)[last][1]
    lab.hpcrl("cancel", "last", "--yes")
    lab.hpcrl("sweep", "cancel", "s", "--yes")
    # a job leaves the queue a moment after its run has ended
    wait_for(lambda: not lab.alive_jobs(), 60.0, "the end of all jobs")
    assert lab.json("sweep", "status", "s")["counts"] == {"CANCELLED": 4}
    assert RunStatus.read(members[3]) is None, "the last one never ran"


def test_a_submit_that_is_killed_is_continued_and_submits_no_job_twice(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    lab = slurm_lab
    command = [sys.executable, "-P", "-c", KILLED, *words(lab, "s", *GRID, "--max-running", "2")]
    assert subprocess.run(command, cwd=tmp_path, env=lab.env, check=False, timeout=240).returncode == -9
    first, second, third, fourth = runs(lab, "s")
    assert [len(RunRecord.read(run).submissions) for run in (first, second, third, fourth)] == [1, 0, 0, 0]
    assert "hpcrl sweep resume s" in lab.hpcrl("sweep", "status", "s").stdout
    lab.hpcrl("sweep", "resume", "s")
    for run in (first, second, third, fourth):
        # LOST may be seen for a moment between the end of a job and the last word of its supervisor
        assert lab.wait_state(run, ["COMPLETED", "FAILED", "CANCELLED"], timeout_s=240)["state"] == "COMPLETED"
    assert [len(RunRecord.read(run).submissions) for run in (first, second, third, fourth)] == [1] * 4
    assert [run.attempts() for run in (first, second, third, fourth)] == [[1]] * 4
    for run in (first, second, third, fourth):
        token = f"{RunRecord.read(run).run_id}:main"
        assert [job.job_id for job in lab.client().find(name=f"hpcrl-{run.name}", token=token)] == [job_id(run)]
    assert lab.hpcrl("sweep", "wait", "s").returncode == 0


def test_members_that_slurm_refuses_stay_in_the_queue(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    """As at a site with a limit of jobs of a user; when there is room, the sweep continues."""
    lab, limit = slurm_lab, tmp_path / "limit"
    limit.touch()
    wrapper = tmp_path / "bin/sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(REFUSING.format(limit=limit, sbatch=shutil.which("sbatch")))
    wrapper.chmod(0o755)
    lab.env["PATH"] = f"{wrapper.parent}:{lab.env['PATH']}"
    refused = lab.hpcrl(*words(lab, "s", *GRID), check=False)
    assert refused.returncode == 2
    assert "2 members of s were not handed over" in refused.stderr
    assert "QOSMaxSubmitJobPerUserLimit" in refused.stderr
    assert "hpcrl sweep resume s" in refused.stderr
    members = runs(lab, "s")
    assert [len(RunRecord.read(run).submissions) for run in members] == [1, 1, 0, 0]
    assert lab.json("status", "s-03")["state"] == "QUEUED"
    assert "QOSMaxSubmitJobPerUserLimit" in lab.hpcrl("sweep", "status", "s").stdout
    limit.unlink()
    lab.hpcrl("sweep", "resume", "s")
    for run in members:
        # LOST may be seen for a moment between the end of a job and the last word of its supervisor
        assert lab.wait_state(run, ["COMPLETED", "FAILED", "CANCELLED"], timeout_s=240)["state"] == "COMPLETED"
    assert [len(RunRecord.read(run).submissions) for run in members] == [1] * 4
