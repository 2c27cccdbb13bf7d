"""A job that ``squeue`` does not list may be there all the same: what ``scontrol`` says counts before a resume."""

from __future__ import annotations

import pytest

from hpcrl.runs.record import RunRecord, Submission
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.errors import SlurmUnavailableError
from hpcrl.submit import jobs
from hpcrl.submit.jobs import hidden_job

RECORD = "JobId=7 JobName=run UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=1 {state}Comment={comment}"


def asked(monkeypatch: pytest.MonkeyPatch, answer: CommandResult) -> str:
    """What is found where ``scontrol`` gives this answer."""
    calls = []

    def run(argv: list[str], **_: object) -> CommandResult:
        calls.append(argv)
        return answer

    client = SlurmClient(run=run)  # type: ignore[arg-type]
    monkeypatch.setattr(jobs, "slurm_client_of", lambda submission: client)
    submission = Submission(submitted_at_s=1.0, executor="slurm", job_id="7", folder="", after_attempt=0)
    record = RunRecord(
        run_id="abc",
        name="run",
        created_at_s=1.0,
        user="ada",
        host="h",
        cwd="/",
        argv=[],
        hpcrl_version="1",
        git_commit="",
        recipe_sha256="",
        cluster_sha256="",
        provenance={},
        submissions=[submission],
    )
    try:
        return hidden_job(record)
    finally:
        assert calls == [["scontrol", "--oneliner", "show", "job", "7"]]


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ("JobState=PENDING ", "PENDING"),
        ("JobState=RUNNING ", "RUNNING"),
        ("JobState=SOMETHING_OF_2031 ", "SOMETHING_OF_2031"),
        ("JobState= ", "UNKNOWN"),
        ("", "UNKNOWN"),
        ("JobState=COMPLETED ", ""),
        ("JobState=CANCELLED ", ""),
    ],
)
def test_only_a_confirmed_end_lets_another_job_start(state: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = RECORD.format(state=state, comment="hpcrl:abc:main")
    assert asked(monkeypatch, CommandResult(0, text, "")) == found


def test_a_later_job_with_the_same_number_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    text = RECORD.format(state="JobState=RUNNING ", comment="hpcrl:other:main")
    assert asked(monkeypatch, CommandResult(0, text, "")) == ""


def test_a_job_that_the_controller_does_not_know_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, CommandResult(1, "", "slurm_load_jobs error: Invalid job id specified")) == ""


def test_a_silent_controller_is_not_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    away = CommandResult(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmUnavailableError):
        asked(monkeypatch, away)
