"""Runs inside of an allocation that is there before; tests/slurm_e2e has one on a real Slurm."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from plans import plan_for

from hpcrl.config.joined import load_both
from hpcrl.config.plan import Plan
from hpcrl.errors import ConfigError, UsageError
from hpcrl.jobplan import make_plan
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunState, RunStatus
from hpcrl.runs.views.diagnosis import diagnose
from hpcrl.slurm import parse
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.in_job import InJob, find_allocation, plan_inside
from hpcrl.slurm.launch_arguments import allocations_from_env
from hpcrl.slurm.scripts import in_job_script
from hpcrl.submit.submission import create_run
from hpcrl.supervisor.attempt.attempt_state import AttemptState
from hpcrl.supervisor.attempt.signal_handler import SignalHandler
from hpcrl.supervisor.launch.step_launcher import StepLauncher

SHELL = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-5]", "SLURM_JOB_PARTITION": "gpu"}


def client(state: str = "RUNNING", ends_in_s: float = 7200.0, limit: str = "2:00:00") -> SlurmClient:
    """A Slurm with job 7."""
    row = {"JobID": "7", "State": state, "EndTime": str(int(time.time() + ends_in_s)), "TimeLimit": limit}

    def answer(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        if argv[0] == "sacct" or not state:
            return CommandResult(0, "", "")
        names = [item.partition(":")[0] for item in argv[-1].removeprefix("--Format=").split(",")]
        return CommandResult(0, parse.SEPARATOR.join([*(row.get(name, "N/A") for name in names), ""]) + "\n", "")

    return SlurmClient(run=answer)


def plan(*settings: str) -> Plan:
    """Three nodes; with the profile's 30 s for a save, Slurm would warn 90 s before the end."""
    return plan_for("quickstart", "devcluster", "engine.replicas=2", *(settings or ("job.layout=single",)))[0]


def test_an_allocation_that_holds_the_plan() -> None:
    job = find_allocation(plan(), SHELL, client())
    assert job.job_id == 7
    assert job.end_s == pytest.approx(time.time() + 7200, abs=5)
    assert find_allocation(plan(), SHELL, client(limit="UNLIMITED")).end_s is None
    placed = allocations_from_env(plan(), SHELL, spare=True)
    assert placed[0, 0].hosts == ("n1", "n2", "n3")


@pytest.mark.parametrize(
    ("environ", "slurm", "settings", "says"),
    [
        ({"SLURM_JOB_ID": ""}, {}, (), "no allocation"),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, {}, (), "has 2 nodes, the run needs 3"),
        ({"SLURM_HET_SIZE": "2"}, {}, (), "heterogeneous"),
        ({}, {"state": "COMPLETING"}, (), "is COMPLETING"),
        ({}, {"state": ""}, (), "not known to Slurm"),
        ({}, {"ends_in_s": 100.0}, (), "saving and ending takes 150 s"),
        ({}, {}, ("job.layout=hetjob",), "job.layout=single"),
    ],
)
def test_an_allocation_that_does_not(
    environ: dict[str, str], slurm: dict[str, Any], settings: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        find_allocation(plan(*settings), {**SHELL, **environ}, client(**slurm))
    assert says in str(caught.value)
    assert "hint: " in str(caught.value)
    if not settings:
        assert "salloc --partition=gpu --nodes=3 --gres=gpu:h200:8 --exclusive --mem=0 --time=" in str(caught.value)


def test_the_attempt_ends_before_the_job() -> None:
    inside = plan_inside(plan(), InJob(7, 5000.0), now_s=1000.0)
    assert inside.time_limit_s == 3970.0
    assert (inside.attempts.requeue, inside.attempts.signalled) == (False, False)
    assert plan_inside(plan(), InJob(7, None), now_s=1000.0).time_limit_s == plan().time_limit_s
    # a job that ends later than the run does not prolong it, and one that is about to end leaves it a second
    assert plan_inside(plan(), InJob(7, 1e9), now_s=1000.0).time_limit_s == plan().time_limit_s
    assert plan_inside(plan(), InJob(7, 1020.0), now_s=1000.0).time_limit_s == 1.0


@pytest.mark.parametrize(
    ("environ", "slurm"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-3]"}, {}),
        ({"SLURM_HET_SIZE": "1"}, {}),
        ({"SLURM_HET_SIZE": ""}, {}),
        ({}, {"ends_in_s": 160.0}),
        ({}, {"ends_in_s": 1.0, "limit": "UNLIMITED"}),
    ],
)
def test_an_allocation_that_just_holds_the_plan(environ: dict[str, str], slurm: dict[str, Any]) -> None:
    assert find_allocation(plan(), {**SHELL, **environ}, client(**slurm)).job_id == 7


def test_a_shell_without_an_allocation_gets_the_salloc_command() -> None:
    with pytest.raises(UsageError) as caught:
        find_allocation(plan(), {}, client())
    hint = str(caught.value).splitlines()[-1]
    words = shlex.split(hint.partition("hint: ")[2].partition(", and")[0])
    assert words[0] == "salloc"
    assert "--nodes=3" in words
    assert words[-1] == "--time=1440"
    assert not [word for word in words if word.startswith("--ntasks")]


@pytest.mark.parametrize(
    ("inside", "state", "says"),
    [
        (True, "COMPLETED", "the allocation, job 7, was given back"),
        (True, "CANCELLED", "scancel, or the end of its shell"),
        (True, "RUNNING", None),
        (False, "CANCELLED", "scancel, or a requeue"),
    ],
)
def test_an_allocation_that_is_given_back_is_named(inside: bool, state: str, says: str | None) -> None:
    def answer(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        return CommandResult(0, f"JobId=7 JobState={state} PreemptTime=None StartTime=5", "")

    _, site = plan_for("quickstart", "devcluster")
    launcher = StepLauncher(site, environ=SHELL, client=SlurmClient(run=answer), inside=inside)
    taken = launcher.taken()
    assert taken is None if says is None else taken is not None and says in taken[1]


def test_the_recipe_takes_what_the_allocation_is() -> None:
    recipe, site = load_both("quickstart", "roce-h100", environ={"SLURM_JOB_PARTITION": "train"}, in_job=True)
    assert (recipe.value.job.layout, recipe.origin(("job", "partition"))) == ("single", "$SLURM_JOB_PARTITION")
    assert site.value.partition_name("engine") == "train"  # type: ignore[union-attr]
    for settings, environ, cluster, key in (
        (["job.layout=elastic"], {}, "roce-h100", "job.layout"),
        (["job.requeue=always"], {}, "roce-h100", "job.requeue"),
        ([], {"SLURM_JOB_PARTITION": "other"}, "roce-h100", "job.partition"),
        ([], {}, "local", "kind"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_both("quickstart", cluster, settings, environ=environ, in_job=True)
        assert [finding.key for finding in caught.value.findings] == [key]


@pytest.mark.parametrize(("signalled", "saves"), [(False, True), (True, False)])
def test_without_a_signal_the_clock_says_when_to_save(
    signalled: bool, saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's own warning comes 90 s before the end; where none comes, the supervisor begins there by itself."""
    wanted = plan_inside(plan(), InJob(7, 5000.0), now_s=1000.0)
    wanted = wanted.model_copy(update={"attempts": wanted.attempts.model_copy(update={"signalled": signalled})})
    warned: list[float] = []

    async def look() -> None:
        notices = SignalHandler(
            RunDir(tmp_path),
            attempt=1,
            plan=wanted,
            board=None,  # type: ignore[arg-type]
            components=[],
            state=AttemptState(None),  # type: ignore[arg-type]
            on_bug=lambda task: None,
            in_step=True,
        )
        for elapsed_s in (0.0, 3870.0, 3885.0):
            monkeypatch.setattr(notices, "_warned", warned.append)
            await notices.look_at_clock(elapsed_s)

    asyncio.run(look())
    assert warned == ([85.0] if saves else []), "so much was left"


def test_the_script_cleans_the_shell_and_keeps_what_submitit_needs(tmp_path: Path) -> None:
    wanted, site = plan_for("quickstart", "devcluster", "engine.replicas=2", "job.layout=single")
    text = in_job_script(wanted, site, run_id="abc", run_dir=tmp_path)
    assert "#SBATCH" not in text
    head, _, command = text.rpartition("exec ")
    assert "HPCRL_RUN_ID=abc" in command
    assert "SUBMITIT_EXECUTOR" not in command, "it is the local one's, and comes with the environment"
    script = tmp_path / "in-job.sh"
    script.write_text(head + "env\n")
    shell = {**os.environ, **SHELL, "SUBMITIT_EXECUTOR": "local", "LD_LIBRARY_PATH": "/somewhere"}
    printed = subprocess.run(["bash", script], env=shell, capture_output=True, text=True, check=True).stdout
    names = {line.partition("=")[0] for line in printed.splitlines()}
    assert {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SUBMITIT_EXECUTOR", "HOME"} <= names
    assert "LD_LIBRARY_PATH" not in names


@pytest.mark.parametrize(("in_job", "says"), [("7", "that of job 7, the allocation"), ("", "job.time_limit_h")])
def test_why_names_whose_limit_it_was(in_job: str, says: str, tmp_path: Path) -> None:
    recipe, site = load_both("quickstart", "devcluster", ["job.layout=single"], environ={})
    run = create_run(recipe.value, site.value, make_plan(recipe.value, site.value, "r", tmp_path / "r")).run
    submission = Submission(submitted_at_s=1.0, executor="local", job_id="9", folder="", after_attempt=0, in_job=in_job)
    record = RunRecord.read(run).with_submission(submission)
    record.write(run)
    myself = ProcessId.of(os.getpid())
    assert myself is not None
    RunStatus(
        run_id=record.run_id,
        attempt=1,
        state=RunState.FAILED,
        supervisor=myself,
        started_at_s=1.0,
        heartbeat_s=2.0,
        ended_at_s=2.0,
        cause=Cause(kind=CauseKind.TIME_LIMIT, time_s=2.0, message="the allocation is about to end"),
    ).write(run)
    assert says in diagnose(run).hint
