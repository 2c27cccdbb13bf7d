"""Runs are found from any directory, and what a command prints works as it stands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from patience import patience
from runs_testing import make_run, write_status
from start_models import write_tiny_model

from hpcrl.cli.main import main
from hpcrl.config.resources import package_data
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

Hpcrl = Callable[..., str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with two profiles that have their own directories of runs, one of them reached by a link."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HPCRL_RUNS_ROOT", raising=False)
    profiles = tmp_path / "config/hpcrl/clusters"
    profiles.mkdir(parents=True)
    text = (package_data("clusters") / "local.yaml").read_text()
    (tmp_path / "big disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big disk")
    for name, root in (("mine", tmp_path / "link/of runs"), ("other", tmp_path / "other")):
        profile = text.replace("name: local", f"name: {name}").replace("runs_root: runs", f"runs_root: {root}")
        (profiles / f"{name}.yaml").write_text(profile)
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def hpcrl(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hpcrl:
    """A command as somebody types it, in a directory; what it prints, both streams."""

    def call(line: str, *, code: int = 0, cwd: str = "elsewhere") -> str:
        monkeypatch.chdir(home / cwd)
        monkeypatch.setattr(sys, "argv", ["hpcrl", *shlex.split(line)])
        ended = 0
        try:
            main()
        except SystemExit as end:
            ended = int(end.code or 0)
        out, err = capsys.readouterr()
        assert ended == code, f"hpcrl {line}: {ended}\n{out}{err}"
        return out + err

    return call


def a_run(root: Path, name: str, run_id: str = "f" * 32, *, age_s: float = 0.0) -> RunDir:
    """One that has failed, which no command has seen yet."""
    run = make_run(root, name)
    write_status(run, RunState.FAILED)
    msgspec.structs.replace(RunRecord.read(run), run_id=run_id).write(run)
    os.utime(run.plan_path, (time.time() - age_s, time.time() - age_s))
    return run


def names(document: str) -> list[str]:
    return [row["name"] for row in json.loads(document)["runs"]]


def test_what_a_submit_prints_works_from_another_directory(home: Path, hpcrl: Hpcrl) -> None:
    model = home / "model"
    model.mkdir()
    write_tiny_model(model)
    settings = f"--set job.payload=probe --set model.path={model}"
    said = hpcrl(f"submit quickstart --cluster mine --name o1 {settings}", cwd="here")
    commands = [line.strip() for line in said.splitlines() if line.startswith("  hpcrl ")]
    assert commands == ["hpcrl status o1 --watch", "hpcrl logs o1 -f", "hpcrl cancel o1"]
    assert hpcrl("status o1").startswith("o1 ")
    assert names(hpcrl("ls --json")) == ["o1"]
    deadline = time.monotonic() + 60 * patience()
    while json.loads(hpcrl("status o1 --json"))["state"] != "COMPLETED":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "trainer 0" in hpcrl(commands[1].removeprefix("hpcrl "))
    assert "has ended already" in hpcrl("cancel o1", code=2)
    said = hpcrl(f"submit quickstart --cluster mine --name o1 {settings}", code=2, cwd="here")
    assert "hpcrl report o1" in said


def test_runs_of_all_profiles_and_of_this_directory(home: Path, hpcrl: Hpcrl) -> None:
    a_run(home / "big disk/of runs", "o1", "a" * 32, age_s=60.0)
    a_run(home / "here/runs", "o2", "b" * 32)
    assert hpcrl("status o1").startswith("o1  FAILED")
    assert "there is no run o2" in hpcrl("status o2", code=2)
    assert hpcrl("status o2", cwd="here").startswith("o2  FAILED")
    # now it is known
    assert hpcrl("status o2").startswith("o2  FAILED")
    assert hpcrl("status bbbbbbbb").startswith("o2  FAILED")
    assert hpcrl("status").startswith("o2 ")  # the newest
    assert names(hpcrl("ls --json")) == ["o2", "o1"]
    assert names(hpcrl("ls --json --runs-root ../here/runs")) == ["o2"]
    # the registry is lost: what lies below the roots of profiles is found all the same, and entered again
    shutil.rmtree(home / "state")
    assert names(hpcrl("ls --json")) == ["o1"]
    assert [path.name for path in (home / "state/hpcrl/runs").iterdir()] == [f"o1,{'a' * 32}"]


def test_two_runs_of_one_name_are_distinguished_by_their_directories(home: Path, hpcrl: Hpcrl) -> None:
    first = a_run(home / "big disk/of runs", "o1", "a" * 32)
    second = a_run(home / "other", "o1", "b" * 32)
    hpcrl("ls")
    said = hpcrl("cancel o1", code=2)
    assert "there are 2 runs o1; which one?" in said
    paths = [shlex.quote(str(run.path)) for run in (first, second)]
    assert all(f"by its directory: {path}" in said for path in paths)
    assert f"hpcrl resume {paths[0]}" in hpcrl(f"why {paths[0]}")
    assert hpcrl(f"status {paths[1]}").startswith("o1  FAILED")
    # a root that somebody names is meant; a run that is gone is not a question any more
    assert hpcrl("status o1 --runs-root ../other").startswith("o1  FAILED")
    shutil.rmtree(second.path)
    assert "hpcrl resume o1" in hpcrl("why o1")
    assert [path.name for path in (home / "state/hpcrl/runs").iterdir()] == [f"o1,{'a' * 32}"]


def test_a_disk_that_is_away_forgets_no_run(home: Path, hpcrl: Hpcrl) -> None:
    a_run(home / "elsewhere/third", "o1")
    hpcrl("status third/o1")
    (home / "elsewhere/third").rename(home / "away")
    assert names(hpcrl("ls --json")) == []
    (home / "away").rename(home / "elsewhere/third")
    assert names(hpcrl("ls --json")) == ["o1"]


def test_a_job_number_finds_its_run(home: Path, hpcrl: Hpcrl) -> None:
    run = a_run(home / "other", "o1")
    record = RunRecord.read(run)
    for executor, code in (("slurm", 0), ("local", 2)):  # the process number of a local run is not a job
        submission = msgspec.structs.replace(record.submissions[0], executor=executor, job_id="4711")
        msgspec.structs.replace(record, submissions=[submission]).write(run)
        hpcrl("why 4711", code=code)
    assert "there is no run 4712" in hpcrl("why 4712", code=2)


def test_a_home_that_refuses_the_registry_hides_no_run(home: Path, hpcrl: Hpcrl) -> None:
    (home / "state").touch()
    run = a_run(home / "other", "o1")
    # what is printed names the directory then
    assert f"hpcrl resume {run.path}" in hpcrl("why o1")
