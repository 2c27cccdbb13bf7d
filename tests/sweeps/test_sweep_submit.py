"""``hpcrl submit`` of a sweep, up to where it would start something."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from start_models import write_tiny_model

from hpcrl.cli.main import main
from hpcrl.processes import procfs
from hpcrl.runs.status import ProcessId
from hpcrl.sweeps import creation
from hpcrl.sweeps.sweep_files import SweepDir

Submit = Callable[..., tuple[int, str, str]]
#: a process that was there once and never will be again
GONE = ProcessId(host=procfs.hostname(), boot_id=procfs.boot_id(), pid=2**22 + 1, start_ticks=1)
RATES = ("--grid", "trainer.optimizer.learning_rate=1e-6,3e-6")


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Submit:
    """The command, of a sweep of the name ``s``."""
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))

    def call(*arguments: str) -> tuple[int, str, str]:
        words = ["hpcrl", "submit", "quickstart", "--set", "job.payload=probe", "--name", "s", *arguments]
        monkeypatch.setattr(sys, "argv", words)
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_dry_run_shows_all_members_and_writes_nothing(submit: Submit, tmp_path: Path) -> None:
    code, out, err = submit(*RATES, "--seeds", "2", "--dry-run")
    assert code == 0, err
    shown = [line.split() for line in out.splitlines()[:4]]
    assert [line[0] for line in shown] == ["s-01", "s-02", "s-03", "s-04"]
    assert shown[2][1:] == ["trainer.optimizer.learning_rate=3e-06", "seed=0"]
    assert "4 runs, at most 1 at a time" in out
    assert "nothing was started" in err
    assert not (tmp_path / "runs").exists()


def test_what_is_wrong_with_a_swept_value_names_its_option(submit: Submit) -> None:
    code, _, err = submit("--grid", "trainer.stepz=1,2")
    assert code == 2
    assert "--grid: trainer.stepz: unknown key" in err
    code, _, err = submit("--sample", "trainer.stepz=uniform(1, 2)", "--random", "2", "--set", "nosuch=1")
    assert "--set: nosuch: unknown key" in err
    code, _, err = submit("--sample", "trainer.stepz=uniform(1, 2)", "--random", "2")
    assert "--sample: trainer.stepz: unknown key" in err


def test_a_dry_run_says_all_that_is_wrong_with_all_members(submit: Submit, tmp_path: Path) -> None:
    options = ("--set", "job.payload=roles", "--set", f"model.path={write_tiny_model(tmp_path / 'model')}", "--dry-run")
    # 3 does not divide the 64 rollouts of a step
    code, _, err = submit("--grid", "rollouts.group_size=8,3", *options)
    assert code == 2
    assert "s-02: " in err
    assert "s-01: " not in err
    code, _, err = submit("--grid", "rollouts.group_size=8,-3", "--grid", "trainer.steps=4,no", *options)
    assert code == 2
    assert "s-03, s-04: " in err
    assert "rollouts.group_size" in err
    assert "s-02, s-04: " in err
    assert "trainer.steps" in err
    # what all members share is there once
    code, _, err = submit(*RATES, *options[:2], "--set", "model.path=nowhere/at/all", "--dry-run")
    assert code == 2
    assert "hpcrl: 1 problem\n" in err
    assert "s-01" not in err
    assert not (tmp_path / "runs").exists()


def test_a_name_that_exists_stops_all_members(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "runs/s-02").mkdir(parents=True)
    code, _, err = submit(*RATES)
    assert code == 2
    assert "s-02" in err
    assert "exists" in err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["s-02"]


@pytest.mark.parametrize("options", [("--follow",), ("--in-job",)])
def test_options_of_one_run_are_refused(submit: Submit, options: tuple[str, ...]) -> None:
    code, _, err = submit(*RATES, *options)
    assert code == 2
    assert f"{options[0]} applies only to a single run" in err


def test_max_running_and_tags_are_checked(submit: Submit) -> None:
    code, _, err = submit("--max-running", "2")
    assert (code, "applies only to a sweep" in err) == (2, True)
    code, _, err = submit(*RATES, "--tag", "a b")
    assert (code, "cannot be a tag" in err) == (2, True)


def test_too_many_members_are_refused_with_a_number(submit: Submit) -> None:
    code, _, err = submit(*RATES, "--seeds", "1000")
    assert code == 2
    assert "the sweep would have 2,000 runs; the maximum is 256" in err


def test_a_full_disk_leaves_nothing(submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = creation.make_run_directory

    def full(*arguments: object, **options: object) -> object:
        made.append(1)
        if len(made) == 2:
            raise OSError(28, "No space left on device", str(tmp_path / "runs/s-02"))
        return make(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(creation, "make_run_directory", full)
        code, _, err = submit(*RATES)
    assert code == 2
    assert "no space is left on the device" in err
    assert not list((tmp_path / "runs").iterdir())


def test_a_submit_that_is_killed_while_it_makes_members_is_done_again(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was started, and `submit` had not returned: the next one takes the names."""

    class KilledError(BaseException):
        pass

    made = []
    make = creation.make_run_directory

    def killed(*arguments: object, **options: object) -> object:
        if made:
            raise KilledError
        made.append(make(*arguments, **options))  # type: ignore[arg-type]
        return made[0]

    with monkeypatch.context() as patch:
        patch.setattr(creation, "make_run_directory", killed)
        # a killed process cleans nothing
        patch.setattr(creation, "_discard", lambda runs: None)
        patch.setattr(SweepDir, "remove", lambda self: None)
        with pytest.raises(KilledError):
            submit(*RATES)
    sweep = SweepDir.below(tmp_path / "runs", "s")
    record = sweep.read()
    assert not record.made
    assert (tmp_path / "runs/s-01/run.json").is_file()
    # its maker is this process, which lives
    code, _, err = submit(*RATES, "--dry-run")
    assert code == 2
    assert "exists" in err
    sweep.write(msgspec.structs.replace(record, maker=GONE))
    monkeypatch.setattr("hpcrl.sweeps.control.start_sweep", lambda sweep, say: None)
    code, _, err = submit(*RATES)
    assert code == 0, err
    again = sweep.read()
    assert again.made
    assert again.sweep_id != record.sweep_id
