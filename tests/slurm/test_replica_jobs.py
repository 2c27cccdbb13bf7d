"""Jobs of single replicas: which of them live, which are cancelled, and what is submitted."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from fake_slurm import FakeSlurm, job

from hpcrl.config.joined import load_both
from hpcrl.config.plan import Plan, Role
from hpcrl.jobplan import make_plan
from hpcrl.runs.exclusions import exclude
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.errors import SlurmError, SlurmRejectedError
from hpcrl.slurm.replica_jobs import ReplicaJobs, cancel_all, cancel_replicas
from hpcrl.submit.submission import create_run

#: comments of jobs by id, and their states
JOBS = {
    1: ("hpcrl:abc:main", "RUNNING"),
    2: ("hpcrl:abc:engine-0", "RUNNING"),
    3: ("hpcrl:abc:engine-1", "CANCELLED"),
    4: ("hpcrl:abc-2:engine-1", "PENDING"),
    5: ("hpcrl:abc-2:main", "PENDING"),
    # another run whose id begins in the same way, and somebody's job that is none of ours
    6: ("hpcrl:abcd:engine-0", "RUNNING"),
    7: ("hpcrl:abcd-2:engine-0", "RUNNING"),
    8: ("abc:engine-0", "RUNNING"),
    9: ("", "RUNNING"),
}


@pytest.fixture
def cancelled(slurm: FakeSlurm) -> list[int]:
    """Fill Slurm's queue; returns the ids of jobs that are cancelled."""
    ids: list[int] = []

    def scancel(argv: list[str]) -> CommandResult:
        ids.append(int(argv[-1]))
        slurm.queue[ids[-1]]["State"] = "CANCELLED"
        return CommandResult(0, "", "")

    slurm.queue = {i: job(i, state, Name="run", Comment=comment) for i, (comment, state) in JOBS.items()}
    slurm.scancel = scancel  # type: ignore[attr-defined]
    return ids


def test_the_end_of_a_run_frees_the_nodes_of_its_replicas(slurm: FakeSlurm, cancelled: list[int]) -> None:
    """Of all submissions; the main job ends by itself."""
    cancel_replicas(slurm.client(), "abc")
    assert cancelled == [2, 4]
    cancel_replicas(slurm.client(), "abc")
    assert cancelled == [2, 4], "what has ended is not cancelled again"


def test_all_jobs_of_a_run_are_cancelled_and_no_others(slurm: FakeSlurm, cancelled: list[int]) -> None:
    assert cancel_all(slurm.client(), "abc", keep_main=True) == cancelled == [2, 4]
    assert cancel_all(slurm.client(), "abc") == [1, 5]
    assert cancelled == [2, 4, 1, 5]
    assert cancel_all(slurm.client(), "abc") == []


def test_where_slurm_is_away_the_end_of_a_run_continues(
    slurm: FakeSlurm, cancelled: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    slurm.away = True
    cancel_replicas(slurm.client(), "abc")
    assert "they end when they see the end of the run" in caplog.text
    with pytest.raises(SlurmError):
        cancel_all(slurm.client(), "abc")
    assert cancelled == []


def test_a_job_that_cannot_be_cancelled_is_reported(slurm: FakeSlurm, cancelled: list[int]) -> None:
    slurm.scancel = lambda argv: slurm.error("scancel: error: Access/permission denied")  # type: ignore[attr-defined]
    with pytest.raises(SlurmRejectedError, match="denied"):
        cancel_all(slurm.client(), "abc")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    recipe, site = load_both("quickstart", "devcluster", ["job.layout=elastic", "engine.replicas=2"], environ={})
    plan = make_plan(recipe.value, site.value, "mine", tmp_path / "runs/mine")
    made = create_run(recipe.value, site.value, plan).run
    msgspec.structs.replace(RunRecord.read(made), run_id="abc").write(made)
    return made


def jobs_of(run: RunDir, slurm: FakeSlurm, number: int = 1) -> tuple[ReplicaJobs, Plan]:
    return ReplicaJobs(run, plan=run.plan(), client=slurm.client(), number=number), run.plan()


def test_live_jobs_of_all_submissions(run: RunDir, slurm: FakeSlurm, cancelled: list[int]) -> None:
    jobs, _ = jobs_of(run, slurm, number=2)
    living = jobs.living()
    assert [(each.submission, each.part, each.job.job_id) for each in living] == [
        ("abc", "main", 1),
        ("abc", "engine-0", 2),
        ("abc-2", "engine-1", 4),
        ("abc-2", "main", 5),
    ]
    assert [each.job.job_id for each in living if jobs.ours(each)] == [4, 5]
    assert [each.job.job_id for each in living if jobs_of(run, slurm)[0].ours(each)] == [1, 2]
    jobs.cancel(living[1])
    assert cancelled == [2]


def test_replicas_that_wait_let_the_main_job_go_first(run: RunDir, slurm: FakeSlurm, cancelled: list[int]) -> None:
    slurm.scontrol = lambda argv: CommandResult(0, "", "")  # type: ignore[attr-defined]
    slurm.queue[9] = job(9, "PENDING", Comment="hpcrl:abc-2:engine-7")
    jobs, _ = jobs_of(run, slurm, number=2)
    jobs.let_main_go_first(5)
    assert slurm.calls[-1] == ["scontrol", "update", "JobId=4,9", "Dependency=after:5"]
    slurm.queue[4]["State"] = slurm.queue[9]["State"] = "RUNNING"
    calls = len(slurm.calls)
    jobs.let_main_go_first(5)
    assert [call[0] for call in slurm.calls[calls:]] == ["squeue"], "nobody waits"


def test_what_slurm_says_last_of_a_job(run: RunDir, slurm: FakeSlurm, cancelled: list[int]) -> None:
    jobs, _ = jobs_of(run, slurm)
    assert jobs.last_word(3) == "Slurm says that job 3 is CANCELLED"
    assert jobs.last_word(2) == ""  # it runs
    assert jobs.last_word(77) == ""  # it is not known


def test_a_replica_is_submitted_once_and_again_when_its_job_has_ended(run: RunDir, slurm: FakeSlurm) -> None:
    jobs, plan = jobs_of(run, slurm)
    group = plan.group(Role.ENGINE)
    first = jobs.submit(group, 3)
    (sbatch,) = [call for call in slurm.calls if call[0] == "sbatch"]
    assert sbatch[:4] == ["sbatch", "--parsable", "--job-name=hpcrl-mine-engine-3", "--comment=hpcrl:abc:engine-3"]
    assert len(sbatch) == 5
    script = Path(sbatch[-1])
    assert script.parent == run.path
    assert "engine-3" in script.name
    assert "hpcrl-mine-engine-3" in script.read_text()
    assert jobs.submit(group, 3) == first
    assert jobs.submit(group, 4) != first
    slurm.queue[first]["State"] = "FAILED"
    second = jobs.submit(group, 3, after=17)
    assert second not in (first, None)
    assert "--dependency=after:17" in [call for call in slurm.calls if call[0] == "sbatch"][-1]
    assert sorted(each.part for each in jobs.living()) == ["engine-3", "engine-4"]


def script_of(slurm: FakeSlurm) -> Path:
    """The script that was submitted last."""
    return Path([call for call in slurm.calls if call[0] == "sbatch"][-1][-1])


def test_the_job_of_a_replica_works_where_the_run_is_now(run: RunDir, slurm: FakeSlurm) -> None:
    """Its directory was moved since it was planned."""
    moved = RunDir(run.path.rename(run.path.parent / "moved"))
    jobs = ReplicaJobs(moved, plan=moved.plan(), client=slurm.client(), number=1)
    jobs.submit(moved.plan().group(Role.ENGINE), 0)
    assert script_of(slurm).parent == moved.path
    text = script_of(slurm).read_text()
    assert str(moved.path) in text
    assert f"{run.path}/" not in text


def test_the_job_of_a_replica_knows_its_submission(run: RunDir, slurm: FakeSlurm) -> None:
    texts = []
    for number in (1, 2):
        jobs_of(run, slurm, number)[0].submit(run.plan().group(Role.ENGINE), 0)
        texts.append(script_of(slurm).read_text())
    assert "hpcrl:abc:engine-0" in texts[0]
    assert "hpcrl:abc-2:engine-0" in texts[1]


def test_the_job_of_a_replica_stays_away_from_nodes_that_fell(run: RunDir, slurm: FakeSlurm) -> None:
    exclude(run, {"n1": "no fan"}, attempt=1, now_s=time.time(), seconds=3600.0)
    nodes = "".join(f"NodeName=n{i} State=IDLE Partitions=gpu\n" for i in range(1, 9))
    slurm.scontrol = lambda argv: CommandResult(0, nodes, "")  # type: ignore[attr-defined]
    jobs_of(run, slurm)[0].submit(run.plan().group(Role.ENGINE), 0)
    assert "--exclude=n1" in script_of(slurm).read_text()


def test_a_resume_has_jobs_of_its_own(run: RunDir, slurm: FakeSlurm) -> None:
    group = run.plan().group(Role.ENGINE)
    first, second = (jobs_of(run, slurm, number)[0].submit(group, 0) for number in (1, 2))
    assert first != second
    assert [(each.submission, each.part) for each in jobs_of(run, slurm)[0].living()] == [
        ("abc", "engine-0"),
        ("abc-2", "engine-0"),
    ]
