"""The reading commands as a person and a program call them."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from runs_testing import GONE, START_S, Hpcrl, make_run, write_log, write_status, write_steps

from hpcrl.processes import procfs
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunState

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / 'it\'s "the" runs root'
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(path))
    return path


@pytest.fixture
def failed(root: Path) -> RunDir:
    run = make_run(root, steps=10)
    cause = Cause(
        kind=CauseKind.ERROR,
        time_s=START_S + 99,
        message="trainer 0 failed: ValueError: the loss is not finite",
        role="trainer",
        replica=0,
        rank=0,
        error="ValueError",
        traceback="Traceback (most recent call last):\nValueError: the loss is not finite\n",
    )
    write_status(run, RunState.FAILED, cause=cause)
    write_log(run, "2026-01-31 12:00:00,100 engine serves\n")
    write_steps(run, 10, total=10)
    return run


def golden(name: str, text: str, root: Path) -> None:
    """Compare with a golden file; what differs from machine to machine is replaced."""
    text = text.replace(json.dumps(str(root))[1:-1], "ROOT").replace(json.dumps(procfs.hostname())[1:-1], "HOST")
    text = re.sub(r'"boot_id": ".*?"', '"boot_id": "BOOT"', text)
    path = GOLDEN / name
    if not path.exists():  # delete it to write it anew, then look at the difference
        path.write_text(text)
        pytest.fail(f"{path} was written")
    assert json.loads(text) == json.loads(path.read_text())


@pytest.mark.parametrize("command", ["status", "ls", "why"])
def test_json_documents_keep_their_schema(command: str, failed: RunDir, hpcrl: Hpcrl, root: Path) -> None:
    code, out, err = hpcrl(command, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["schema"] == f"hpcrl.{command}/1"
    golden(f"{command}.json", out, root)


def test_status_for_people(failed: RunDir, hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl("status", "run-1")
    assert code == 0
    assert "step 10/10" in out
    assert "the loss is not finite" in out


def test_status_watch_ends_with_the_run(failed: RunDir, hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl("status", "--watch")
    assert code == 0
    assert out.count("\nstep ") == 10
    assert "held-out reward" in out


def test_ls(failed: RunDir, hpcrl: Hpcrl, root: Path) -> None:
    assert "FAILED" in hpcrl("ls")[1]
    code, out, err = hpcrl("ls", "--runs-root", str(root / "empty"))
    assert (code, out) == (0, "")
    assert "hpcrl submit" in err


def test_ls_of_some(failed: RunDir, hpcrl: Hpcrl, root: Path) -> None:
    write_status(make_run(root, "run-2"), RunState.COMPLETED)
    names = lambda *options: [run["name"] for run in json.loads(hpcrl("ls", "--json", *options)[1])["runs"]]  # noqa: E731
    assert names() == ["run-2", "run-1"]
    assert names("-n", "1") == ["run-2"]
    assert names("--state", "failed") == ["run-1"]
    assert names("--state", "failed", "--state", "COMPLETED", "-n", "1") == ["run-2"]
    assert names("--cluster", "local", "--state", "FAILED") == ["run-1"]
    assert names("--cluster", "site") == []
    code, _, err = hpcrl("ls", "--state", "broken")
    assert code == 2
    assert "BROKEN is not a state of a run\n    hint: QUEUED, SUBMITTED, " in err
    assert "no run matches" in hpcrl("ls", "--cluster", "site")[2]


def test_why(failed: RunDir, hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl("why", "run-1")
    assert code == 0
    for part in ("the loss is not finite", "Traceback", "hpcrl resume run-1"):
        assert part in out


def test_logs(failed: RunDir, hpcrl: Hpcrl) -> None:
    assert hpcrl("logs", "run-1")[1] == "engine 0 | 2026-01-31 12:00:00,100 engine serves\n"
    assert hpcrl("logs", "run-1", "-f")[1] == "engine 0 | 2026-01-31 12:00:00,100 engine serves\n"
    assert json.loads(hpcrl("logs", "run-1", "--json")[1])["line"].endswith("engine serves")
    assert hpcrl("logs", "run-1", "--grep", "nothing") == (0, "", "")


def test_report(failed: RunDir, hpcrl: Hpcrl) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = hpcrl("report", "run-1")
    assert code == 0
    assert Path(out.strip()).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("command", ["status", "logs", "why", "report", "cancel", "resume"])
def test_an_unknown_run_is_a_usage_error(command: str, failed: RunDir, hpcrl: Hpcrl) -> None:
    code, out, err = hpcrl(command, "rum-1")
    assert (code, out) == (2, "")
    assert "did you mean run-1?" in err


def test_cancel_of_what_has_ended(failed: RunDir, hpcrl: Hpcrl) -> None:
    code, _, err = hpcrl("cancel", "run-1", "-y")
    assert code == 2
    assert "has ended already (FAILED)" in err


def test_resume_of_what_is_completed(root: Path, hpcrl: Hpcrl) -> None:
    write_status(make_run(root), RunState.COMPLETED)
    code, _, err = hpcrl("resume", "run-1")
    assert code == 2
    assert "nothing to resume" in err


def test_a_resume_to_fewer_steps_than_are_done_is_refused(failed: RunDir, hpcrl: Hpcrl) -> None:
    """It would say "steps 10 of 8" and COMPLETED."""
    code, _, err = hpcrl("resume", "run-1", "--set", "trainer.steps=8")
    assert code == 2
    assert "has done 10 steps, trainer.steps=8 asks for fewer; nothing was changed" in err
    assert "--set trainer.steps=20" in err
    assert failed.recipe().trainer.steps == 10


def test_rm_says_what_it_frees_and_asks(
    failed: RunDir, hpcrl: Hpcrl, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (failed.checkpoints_dir / "step-000010").mkdir(parents=True)
    (failed.checkpoints_dir / "step-000010" / "data").write_bytes(b"x" * 3_000_000)
    code, out, err = hpcrl("rm", "run-1", "--dry-run")
    assert (code, out) == (0, "")
    assert re.search(r"2\.9 MiB +1 file   checkpoints\n", err)
    assert "nothing was removed" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert hpcrl("rm", "run-1")[0] == 1
    monkeypatch.setattr("sys.stdin", io.StringIO(""))  # nobody is there to ask
    code, _, err = hpcrl("rm", "run-1")
    assert code == 2
    assert "hint: --yes" in err
    assert failed.path.is_dir()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    code, out, _ = hpcrl("rm", "run-1")
    assert (code, out.strip()) == (0, "removed run-1")
    assert list(root.iterdir()) == []


def test_rm_leaves_what_is_alive_or_pinned(root: Path, hpcrl: Hpcrl) -> None:
    run = make_run(root)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, RunState.RUNNING, supervisor=me)
    code, _, err = hpcrl("rm", "run-1", "--yes")
    assert code == 2
    assert "has not ended (RUNNING); nothing was changed\n    hint: end it first: hpcrl cancel run-1" in err
    write_status(run, RunState.COMPLETED)
    run.checkpoints_dir.mkdir()
    (run.checkpoints_dir / "step-000010.pin.json").write_text("{}")
    code, _, err = hpcrl("rm", "run-1", "--yes")
    assert code == 2
    assert "are pinned: steps 10" in err
    (run.checkpoints_dir / "step-000010.pin.json").unlink()
    # lost, as seen from a machine that cannot see its supervisor
    write_status(run, RunState.RUNNING, supervisor=msgspec.structs.replace(GONE, host="elsewhere"))
    code, _, err = hpcrl("rm", "run-1", "--yes")
    assert code == 2
    assert "was supervised on elsewhere, which is not visible here" in err
    assert run.path.is_dir()
