"""Waiting for runs, by the function and by the command."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from runs_testing import Hpcrl, make_run, write_status

from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.status import ProcessId, RunState
from hpcrl.runs.waiting import WaitTimeoutError, wait_for_state

GIVEN_UP = Cause(time_s=0.0, kind=CauseKind.NO_PROGRESS, message="three attempts made no step")


def myself() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_each_state_is_reported_until_the_end(tmp_path: Path) -> None:
    run, told = make_run(tmp_path), []
    write_status(run, RunState.STARTING, supervisor=myself())
    follows = iter([RunState.RUNNING, RunState.STOPPING, RunState.COMPLETED])

    def tell(view: object) -> None:
        told.append(view.state)  # type: ignore[attr-defined]
        if (state := next(follows, None)) is not None:
            write_status(run, state, supervisor=myself())

    assert wait_for_state(run, told=tell, timeout_s=60.0).state is RunState.COMPLETED
    assert told == [RunState.STARTING, RunState.RUNNING, RunState.STOPPING, RunState.COMPLETED]


def test_a_run_that_is_not_there_in_time_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.STARTING, supervisor=myself())
    with pytest.raises(WaitTimeoutError, match=r"run-1 has not ended within 0.01 s: it is STARTING"):
        wait_for_state(run, timeout_s=0.01)
    with pytest.raises(WaitTimeoutError, match="is not ready within"):
        wait_for_state(run, running=True, timeout_s=0.01)
    write_status(run, RunState.RUNNING, supervisor=myself())
    assert wait_for_state(run, running=True, timeout_s=0.0).state is RunState.RUNNING


@pytest.mark.parametrize(
    ("state", "cause", "code"),
    [
        (RunState.COMPLETED, None, 0),
        (RunState.CANCELLED, None, 130),
        (RunState.FAILED, Cause(time_s=0.0, kind=CauseKind.EXIT, message="it failed"), 1),
        (RunState.FAILED, GIVEN_UP, 93),
        # the supervisor is gone without a word
        (RunState.RUNNING, None, 1),
    ],
)
def test_the_exit_code_is_that_of_the_end(
    root: Path, hpcrl: Hpcrl, state: RunState, cause: Cause | None, code: int
) -> None:
    run = make_run(root)
    write_status(run, state, cause=cause)
    found, out, err = hpcrl("wait", run.name)
    assert found == code
    assert out == f"{run.name}: {'LOST' if state is RunState.RUNNING else state}\n"
    assert ("hpcrl why" in err) == (code != 0)


def test_of_several_runs_the_first_that_was_not_completed_decides(root: Path, hpcrl: Hpcrl) -> None:
    states = [RunState.COMPLETED, RunState.CANCELLED, RunState.FAILED]
    for number, state in enumerate(states):
        write_status(make_run(root, f"run-{number}"), state)
    names = [f"run-{number}" for number in range(3)]
    code, out, _ = hpcrl("wait", *names)
    assert code == 130
    assert out.splitlines() == ["run-0: COMPLETED", "run-1: CANCELLED", "run-2: FAILED"]
    code, _, err = hpcrl("wait", "run-0", "nowhere")
    assert code == 2
    assert "nowhere" in err


def test_what_ends_while_it_is_waited_for_is_seen(root: Path, hpcrl: Hpcrl) -> None:
    run = make_run(root)
    write_status(run, RunState.RUNNING, supervisor=myself())
    code, _, err = hpcrl("wait", run.name, "--timeout", "0.1")
    assert (code, "has not ended within" in err) == (1, True)
    assert hpcrl("wait", run.name, "--running")[0] == 0
    later = threading.Timer(0.3, write_status, (run, RunState.COMPLETED))
    later.start()
    assert hpcrl("wait", run.name)[:2] == (0, f"{run.name}: COMPLETED\n")
    later.join()
