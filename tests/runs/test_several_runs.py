"""``status``, ``report``, ``cancel`` and ``rm`` of several runs: one that fails does not stop the others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from runs_testing import Hpcrl, make_run, write_status, write_steps

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunState


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDir, RunDir]:
    """Two runs that have ended, the second one with steps."""
    root = tmp_path / "runs"
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(root))
    one, other = make_run(root, "one"), make_run(root, "other", steps=4)
    for run in (one, other):
        write_status(run, RunState.COMPLETED)
    write_steps(other, 4, total=4)
    return one, other


def test_rm_removes_all_that_may_go(two: tuple[RunDir, RunDir], hpcrl: Hpcrl) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(two[0], RunState.RUNNING, supervisor=me)
    code, out, err = hpcrl("rm", "one", "nosuch", "other", "--yes")
    assert (code, out) == (2, "removed other\n")
    assert "hpcrl: the run one has not ended (RUNNING)" in err
    assert "nosuch" in err
    assert two[0].path.is_dir()
    assert not two[1].path.exists()


def test_rm_of_a_run_that_is_named_twice_removes_it_once(two: tuple[RunDir, RunDir], hpcrl: Hpcrl) -> None:
    assert hpcrl("rm", "one", "one", "other", "--yes")[:2] == (0, "removed one\nremoved other\n")


def test_a_no_keeps_one_run_and_the_next_is_asked_about(
    two: tuple[RunDir, RunDir], hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True])
    monkeypatch.setattr("typer.confirm", lambda question, err: next(answers))
    code, out, err = hpcrl("rm", "one", "other")
    assert (code, out) == (1, "removed other\n")
    assert err.count("nothing was changed") == 1
    assert two[0].path.is_dir()


def test_cancel_tells_of_each_run(two: tuple[RunDir, RunDir], hpcrl: Hpcrl) -> None:
    code, out, err = hpcrl("cancel", "one", "other", "--yes")
    assert (code, out) == (2, "")
    for name in ("one", "other"):
        assert f"the run {name} has ended already (COMPLETED)" in err


def test_status_shows_each_run(two: tuple[RunDir, RunDir], hpcrl: Hpcrl) -> None:
    code, out, err = hpcrl("status", "other", "nosuch", "one")
    assert code == 2
    assert [line.split()[0] for line in out.splitlines() if "COMPLETED" in line] == ["other", "one"]
    assert "nosuch" in err
    code, out, _ = hpcrl("status", "other", "one", "--json")
    assert (code, [each["schema"] for each in json.loads(out)]) == (0, ["hpcrl.status/1"] * 2)
    code, out, _ = hpcrl("status", "other", "nosuch", "--json")
    assert (code, len(json.loads(out))) == (2, 1)
    assert json.loads(hpcrl("status", "other", "--json")[1])["schema"] == "hpcrl.status/1"
    assert hpcrl("status", "one", "other", "--watch")[0] == 2


def test_each_run_gets_its_own_picture(two: tuple[RunDir, RunDir], hpcrl: Hpcrl, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = hpcrl("report", "one", "other")
    assert (code, out) == (2, f"{two[1].path / 'report.png'}\n")
    assert "one has no step yet" in err
    assert (two[1].path / "report.png").read_bytes()[:4] == b"\x89PNG"
    picture = tmp_path / "both.png"
    code, _, err = hpcrl("report", "one", "other", "-o", str(picture))
    assert (code, "--output" in err, picture.exists()) == (2, True, False)
