"""Run directories are closed, or open to one group for reading; what others could have written is not executed."""

from __future__ import annotations

import asyncio
import grp
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor_testing import create, make_cluster, make_plan, make_recipe, start, wait_ended

from hpcrl.config.cluster_base import FilesConfig
from hpcrl.errors import RunDirError, UsageError
from hpcrl.processes.environment_marks import RUN_ID_VARIABLE
from hpcrl.processes.interpreter import module_command
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.privacy import protect
from hpcrl.runs.status import RunState
from hpcrl.slurm.scripts import batch_process
from hpcrl.storage import trusted_paths
from hpcrl.submit.slurm_executor import SlurmExecutor
from hpcrl.submit.submission import create_run, prepare_resume
from hpcrl.supervisor.process.guarded import ProcessSpec, guard_command, start_guarded
from hpcrl.supervisor.process.leftovers import Scratch

OTHERS = 0o077
STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def careless_user() -> Iterator[None]:
    """A umask that keeps nothing back."""
    previous = os.umask(0)
    yield
    os.umask(previous)


def modes(run: RunDir) -> dict[str, int]:
    """Mode of the run directory and of everything in it; links have none."""
    paths = [run.path, *(path for path in run.path.rglob("*") if not path.is_symlink())]
    return {str(path.relative_to(run.path)): stat.S_IMODE(path.lstat().st_mode) for path in paths}


def test_everything_of_a_run_is_closed(tmp_path: Path) -> None:
    """A whole run of stand-ins, with submitit's pickles, logs, events and what its roles write."""
    (tmp_path / "root").mkdir(mode=0o755)
    run = start(tmp_path / "root", trainer="finish")
    view = wait_ended(run)
    assert view.state is RunState.COMPLETED
    found = modes(run)
    assert {name: oct(mode) for name, mode in found.items() if mode & OTHERS} == {}
    assert {"run.json", "plan.json", "status.json", "events", "submitit", "attempts/0001/logs"} <= found.keys()
    assert any(name.endswith(".pkl") for name in found)
    assert any(name.endswith(".log") and name.startswith("attempts") for name in found)


def test_a_group_may_read(tmp_path: Path) -> None:
    gid = os.getgroups()[-1] if os.getgroups() else os.getgid()
    name = grp.getgrgid(gid).gr_name
    cluster = make_cluster().model_copy(update={"files": FilesConfig(group=name)})
    run = create_run(make_recipe(), cluster, make_plan(tmp_path / "root/run-1")).run
    found = modes(run)
    assert found.pop(".") == 0o2750
    assert found.pop("token") == 0o600
    assert {name: oct(mode) for name, mode in found.items() if mode not in (0o640, 0o2750)} == {}
    assert found["run.json"] == 0o640
    assert run.path.stat().st_gid == gid
    with trusted_paths.files_as(run.path):
        (run.path / "attempts").mkdir()
        (run.path / "attempts/log").touch()
    assert modes(run)["attempts/log"] == 0o640
    # the group comes with the directory
    assert (run.path / "attempts/log").stat().st_gid == gid
    assert modes(run)["attempts"] == 0o2750


def test_a_group_that_is_none_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    cluster = make_cluster().model_copy(update={"files": FilesConfig(group="no-such-group")})
    (tmp_path / "root").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="no group 'no-such-group'"):
        create_run(make_recipe(), cluster, make_plan(tmp_path / "root/run-1"))
    assert list((tmp_path / "root").iterdir()) == []
    assert os.umask(0) == 0, "the user's umask is as it was"


def test_a_directory_of_runs_that_all_users_may_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o777)
    with pytest.raises(RunDirError, match=r"no sticky bit.*\n.*chmod \+t"):
        create(tmp_path / "root")
    (tmp_path / "root").chmod(0o1777)
    create(tmp_path / "root")


def test_an_older_run_that_was_open_is_closed_when_it_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "root").mkdir(mode=0o755)
    run = create(tmp_path / "root")
    (run.path / "submitit").mkdir()
    (run.path / "submitit/old.pkl").touch()
    for path in (*run.path.rglob("*"), run.path):
        path.chmod(0o775 if path.is_dir() else 0o664)
    protect(run, None)
    assert modes(run)["."] == 0o700
    assert not {name: mode for name, mode in modes(run).items() if mode & 0o022}
    assert "was writable by others (mode 775)" in caplog.text
    run.path.chmod(0o755)
    protect(run, None)
    assert modes(run)["."] == 0o700
    assert "could be read by others" in caplog.text
    caplog.clear()
    protect(run, None)
    assert not caplog.records


def test_the_run_of_another_user_cannot_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir(mode=0o755)
    run = create(tmp_path / "root")
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with pytest.raises(RunDirError, match="only its owner can resume it"):
        prepare_resume(run)


@needs_root
def test_files_of_other_users_in_an_open_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o755)
    run = create(tmp_path / "root")
    planted = run.path / "submitit/1_submitted.pkl"
    planted.parent.mkdir()
    planted.touch()
    os.chown(planted, STRANGER, STRANGER)
    run.path.chmod(0o777)
    with pytest.raises(RunDirError, match=r"1_submitted\.pkl belongs to user 54321, and would be executed as you"):
        prepare_resume(run)


class _Executed:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    ("opened", "says"), [("folder", "writable by others"), ("run", "writable by others"), ("pickle", "1_submitted")]
)
def test_pickles_that_others_could_have_written_are_not_loaded(opened: str, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "run/submitit"
    folder.mkdir(parents=True, mode=0o755)
    folder.parent.chmod(0o755)
    (folder / "1_submitted.pkl").write_bytes(pickle.dumps(_Executed()))
    (folder / "1_submitted.pkl").chmod(0o600)
    {"folder": folder, "run": folder.parent, "pickle": folder / "1_submitted.pkl"}[opened].chmod(0o777)
    env = {**os.environ, "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    result = subprocess.run(
        module_command(sys.executable, "hpcrl.slurm.batch", str(folder)),
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert says in result.stderr
    assert "hint: chmod -R go-w" in result.stderr
    assert not (tmp_path / "executed").exists()


def test_pickles_of_the_same_user_are_loaded_in_a_job(tmp_path: Path) -> None:
    """What `hpcrl.slurm.batch` becomes is submitit's process: it runs the call and writes down how it ended."""
    (tmp_path / "run").mkdir(mode=0o700)
    folder = tmp_path / "run/submitit"
    with trusted_paths.files_as(folder.parent):
        job = SlurmExecutor(folder, submit=lambda: 1, time_limit_s=60.0).submit(os.getpid)
    (folder / "1_0_log.out").touch(mode=0o666)  # Slurm's, with its own mode
    env = {**os.environ, "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    env |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    done = subprocess.run(batch_process(folder), env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert job.paths.result_pickle.is_file()


def test_a_temporary_directory_that_others_took_is_not_used(tmp_path: Path) -> None:
    def scratch() -> Scratch:
        return Scratch(str(tmp_path), run_id="a" * 32, attempt=1, role="engine", replica=0)

    tmp_path.chmod(0o1777)
    plain = scratch()
    plain.prepare()
    assert (plain.problem, plain.path.parent.name) == ("", f"hpcrl-{'a' * 12}")
    plain.remove()
    (tmp_path / f"hpcrl-{'a' * 12}").mkdir(mode=0o777)
    taken = scratch()
    taken.prepare()
    assert "writable by others" in taken.problem
    assert taken.path.parent.name.startswith(f"hpcrl-{'a' * 12}-")
    assert stat.S_IMODE(taken.path.parent.stat().st_mode) == 0o700
    taken.remove()
    assert [path.name for path in tmp_path.iterdir()] == [f"hpcrl-{'a' * 12}"]


@pytest.mark.parametrize("state", ["absent", "taken"])
async def test_compile_caches_on_the_nodes_disk_are_ours(state: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o755)
    if state == "taken":
        (disk / "hpcrl-night").mkdir(mode=0o777)
    told = ProcessSpec(
        role="engine",
        replica=0,
        attempt=1,
        command=[sys.executable, "-c", ""],
        env={**os.environ, RUN_ID_VARIABLE: "caches", "TRITON_CACHE_DIR": f"{disk}/hpcrl-night/triton"},
        cwd=str(tmp_path),
        logs=[str(tmp_path / "log")],
        grace_s=5.0,
        events_path=str(tmp_path / "events.jsonl"),
        events_writer="guard",
        scratch=str(disk),
    )
    process = await start_guarded(guard_command(sys.executable), told, env=os.environ)
    end = await process.ended()
    await asyncio.wait_for(process.gone(), 60.0)
    if state == "taken":
        assert f"{disk}/hpcrl-night is writable by others" in end.spawn_error
    else:
        assert end.clean
        assert stat.S_IMODE((disk / "hpcrl-night").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
