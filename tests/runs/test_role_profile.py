"""The command's side of `hpcrl profile`: it waits no longer than it must, and reaches the node of a rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import patience
from runs_testing import Hpcrl, make_run, write_status

from hpcrl.config.joined import load_both
from hpcrl.errors import DeadlineError, ExitCode, HpcrlError
from hpcrl.jobplan import make_plan
from hpcrl.runs.profile_request import ProfileAnswer, profile_dir, read_profile_request, request_path
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus, ProcessId, RunState, RunStatus
from hpcrl.submit import role_profile
from hpcrl.submit.role_profile import StepProfileOptions, copy_trace, profile_steps
from hpcrl.submit.submission import create_run


def me() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose supervisor is this process; its trainer does nothing."""
    made = make_run(tmp_path)
    write_status(made, RunState.RUNNING, supervisor=me())
    return made


def after_request(run: RunDir, act: Callable[[], object]) -> threading.Thread:
    """Do something when the request is there."""

    def work() -> None:
        while not request_path(run, 1, 0).exists():
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def answered(run: RunDir, answer: ProfileAnswer) -> None:
    request = read_profile_request(request_path(run, 1, 0))
    assert request is not None
    answer.write(profile_dir(run, 1, request.id))
    request_path(run, 1, 0).unlink()


def test_an_answer_is_returned_and_a_problem_is_an_error(run: RunDir) -> None:
    good = ProfileAnswer(first=4, last=5, device="cuda", files=["memory.pickle", "trace.json.gz"], held_s=1.5)
    thread = after_request(run, lambda: answered(run, good))
    made = profile_steps(run, StepProfileOptions())
    thread.join()
    assert [path.name for path in made.files] == ["memory.pickle", "trace.json.gz"]
    assert made.words == "steps 4 to 5 of rank 0 on cuda; it was held up for 1.5 s"
    thread = after_request(run, lambda: answered(run, ProfileAnswer(problem="kineto says no")))
    with pytest.raises(HpcrlError, match="rank 0 of run-1 has made no profile: kineto says no"):
        profile_steps(run, StepProfileOptions())
    thread.join()


def test_what_ends_the_wait(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_profile, "_LOOK_S", 0.1)
    with pytest.raises(DeadlineError, match=r"has not recorded 2 steps within 0\.2 s; the request is withdrawn"):
        profile_steps(run, StepProfileOptions(timeout_s=0.2))
    assert not request_path(run, 1, 0).exists()
    assert list(profile_dir(run, 1, "x").parent.iterdir()) == []
    thread = after_request(run, lambda: request_path(run, 1, 0).unlink())
    with pytest.raises(HpcrlError, match="rank 0 could not answer"):
        profile_steps(run, StepProfileOptions(timeout_s=60.0 * patience()))
    thread.join()
    thread = after_request(run, lambda: write_status(run, RunState.FAILED, supervisor=me()))
    with pytest.raises(HpcrlError, match="attempt 1 of run-1 ended before the profile was made"):
        profile_steps(run, StepProfileOptions(timeout_s=60.0 * patience()))
    thread.join()
    assert not request_path(run, 1, 0).exists()


def test_copies_are_compressed_by_their_name(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    source.write_bytes(b"[1, 2]" * 1000)
    for name in ("a.json.gz", "b.json", "c.json.gz"):
        copy_trace(source, tmp_path / name)
        source = tmp_path / name
    assert (tmp_path / "b.json").read_bytes() == b"[1, 2]" * 1000
    assert (tmp_path / "c.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert len(list(tmp_path.iterdir())) == 4


def test_a_rank_is_reached_on_its_own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hpcrl: Hpcrl) -> None:
    sizes = ["trainer.ranks=4", "trainer.nodes=2"]
    recipe, site = load_both("quickstart", "devcluster", sizes, environ={})
    run = create_run(recipe.value, site.value, make_plan(recipe.value, site.value, "mine", tmp_path / "runs/mine")).run
    record = RunRecord.read(run)
    submission = Submission(submitted_at_s=time.time(), executor="slurm", job_id="7", folder="/f", after_attempt=0)
    record.with_submission(submission).write(run)
    trainer = ComponentStatus(
        role="trainer", replica=0, state=ComponentState.READY, pid=1, host="n001", nodes=["n001", "n002"]
    )
    now = time.time()
    RunStatus(
        run_id=record.run_id,
        attempt=run.start_attempt(),
        state=RunState.RUNNING,
        supervisor=me(),
        started_at_s=now,
        heartbeat_s=now,
        components=[trainer],
    ).write(run)
    answers = {
        "scontrol": '[ "$*" = ping ] && echo "Slurmctld(primary) at n000 is UP" || echo "JobId=7 NodeList=n00[1-2]"',
        # the last argument is the file that is asked for
        "srun": f'echo "$@" > {tmp_path}/entered; for last in "$@"; do :; done; echo "Thread 1 (idle)" > "$last"',
        "squeue": "exit 1",
        "sacct": "exit 1",
    }
    for program, does in answers.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for rank, node in ((1, "n001"), (2, "n002")):
        code, out, err = hpcrl("profile", str(run.path), "--rank", str(rank), "--stacks")
        assert (code, out) == (ExitCode.OK, "Thread 1 (idle)\n\n"), err
        entered = (tmp_path / "entered").read_text()
        assert f"--nodelist={node} " in entered
        assert f"hpcrl.supervisor.launch.role_spy {record.run_id} trainer 0 {rank} 0 " in entered
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    code, _, err = hpcrl("profile", str(run.path), "--rank", "1", "--seconds", "1")
    assert code == ExitCode.FAILED
    assert "py-spy did not record trainer of mine (exit code 1)" in err
    assert "ptrace_scope" in err
