"""A run id stands for one directory: what is done to a copy leaves the original alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from runs_testing import make_run, write_status

from hpcrl.errors import RunDirError
from hpcrl.processes.environment_marks import KIND_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrl.runs import job_facts
from hpcrl.runs.copies import original_of, with_own_identity
from hpcrl.runs.observe import observe, open_job
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunState
from hpcrl.runs.views.listing import list_rows
from hpcrl.submit import jobs
from hpcrl.submit.removal import remove_run
from hpcrl.submit.submission import cancel, end_leftovers


def placed(tmp_path: Path, name: str = "one") -> RunDir:
    run = make_run(tmp_path, name)
    msgspec.structs.replace(RunRecord.read(run), run_dir=str(run.path)).write(run)
    return run


def copied(run: RunDir, name: str = "one.bak") -> RunDir:
    shutil.copytree(run.path, run.path.with_name(name), symlinks=True)
    return RunDir(run.path.with_name(name))


@pytest.fixture
def role(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the original, as a role has its environment."""
    run = placed(tmp_path)
    marks = {
        RUN_ID_VARIABLE: RunRecord.read(run).run_id,
        KIND_VARIABLE: "role",
        RUN_DIR_VARIABLE: str(run.path),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, **marks},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_nothing_that_is_done_to_a_copy_touches_the_originals_processes(
    tmp_path: Path, role: subprocess.Popen[bytes]
) -> None:
    original = RunDir(tmp_path / "one")
    write_status(original, RunState.FAILED)
    copy = copied(original)
    with pytest.raises(RunDirError, match="is a copy of the run in"):
        cancel(copy, user="me")
    assert end_leftovers(copy) == 0
    assert role.poll() is None
    remove_run(copy)
    assert not copy.path.exists()
    assert role.poll() is None
    # of the original they are left-overs
    assert end_leftovers(original) == 1
    role.wait(120)


def test_a_copy_whose_original_was_moved_leaves_that_alone(tmp_path: Path, role: subprocess.Popen[bytes]) -> None:
    """Nobody can tell which of the two was moved; a process says where it works."""
    original = RunDir(tmp_path / "one")
    copy = copied(original)
    moved = original.path.rename(tmp_path / "two")
    original.path.symlink_to(moved)  # where the process works
    write_status(copy, RunState.FAILED)
    original.path.unlink()
    shutil.copytree(moved, original.path)
    assert end_leftovers(copy) == 0
    assert role.poll() is None


def test_a_copy_of_a_run_that_continues_is_not_running(tmp_path: Path) -> None:
    run = placed(tmp_path)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, RunState.RUNNING, supervisor=me)
    copy = copied(run)
    assert observe(run).state is RunState.RUNNING
    view = observe(copy)
    assert (view.state, view.name, view.copy_of) == (RunState.LOST, "one.bak", str(run.path))
    rows = {row.name: row for row in list_rows([run, copy])}
    assert rows["one"].state is RunState.RUNNING
    assert rows["one.bak"].cause == f"a copy of {run.path}"


def test_the_job_of_the_original_is_not_queried_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = placed(tmp_path)
    record = RunRecord.read(run)
    slurm = msgspec.structs.replace(record.submissions[-1], executor="slurm", job_id="7", process=None)
    msgspec.structs.replace(record, submissions=[slurm]).write(run)
    copy = copied(run)
    monkeypatch.setattr(job_facts, "_sources", [lambda submissions: pytest.fail("it asked")])
    monkeypatch.setattr(jobs, "SlurmClient", lambda: pytest.fail("it asked"))
    assert observe(copy).job is None
    assert open_job(copy) is None
    assert open_job(run) is not None
    with pytest.raises(RunDirError, match="is a copy of"):
        cancel(copy, user="me")
    assert RunRecord.read(copy).submissions[-1].cancel_requested_at_s is None


def test_a_copy_that_is_handed_over_is_a_run_of_its_own(tmp_path: Path) -> None:
    run = placed(tmp_path)
    copy = copied(run)
    before = RunRecord.read(run)
    own = with_own_identity(copy, RunRecord.read(copy))
    assert own == RunRecord.read(copy)
    assert own.run_id != before.run_id
    assert (own.name, own.submissions, own.run_dir) == ("one.bak", [], str(copy.path))
    assert original_of(copy, own) is None
    assert RunRecord.read(run) == before
    assert with_own_identity(run, before) == before


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_that_was_moved_stays_what_it_is(recorded: bool, tmp_path: Path) -> None:
    """Records of earlier versions do not say where they were made; plans do."""
    run = placed(tmp_path) if recorded else make_run(tmp_path, "one")
    moved = RunDir(run.path.rename(tmp_path / "elsewhere"))
    record = RunRecord.read(moved)
    assert original_of(moved, record) is None
    own = with_own_identity(moved, record)
    assert (own.run_id, own.submissions, own.run_dir) == (record.run_id, record.submissions, str(moved.path))
    # another run took its place meanwhile
    other = make_run(tmp_path, "one")
    msgspec.structs.replace(RunRecord.read(other), run_id=RunRecord.new_id()).write(other)
    assert original_of(moved, record) is None
    link = tmp_path / "link"
    link.symlink_to(moved.path)
    assert original_of(RunDir(link), own) is None
