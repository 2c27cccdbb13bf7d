"""A run whose supervisor cannot write what it has to say: it goes on, ends as it should, and says all of it later."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_shim import build_shim
from patience import hold_reader
from supervisor_testing import create, end_everything, start, wait_ended, wait_for, wait_running

from hpcrl.config.layout import AttemptPolicy
from hpcrl.processes import procfs
from hpcrl.runs.cause import CauseKind
from hpcrl.runs.contents import RunContents
from hpcrl.runs.events import read_events
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.submit.submission import submit_attempt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "runs"
    yield path
    for run_dir in path.iterdir() if path.is_dir() else ():
        end_everything(RunDir(run_dir))


def states(run: RunDir) -> list[str]:
    return [event.data["state"] for event in read_events(run, kind="run.state")]


@pytest.mark.parametrize(
    ("fault", "file"),
    [("op=open errno=116 path=.status.json", "status.json"), ("op=write errno=122 path=/events/", "events/")],
)
def test_reports_that_fail_cost_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, file: str
) -> None:
    switch = tmp_path / "sick"
    # `who`: the supervisor has no role
    monkeypatch.setenv("LD_PRELOAD", str(build_shim(tmp_path)))
    monkeypatch.setenv("HPCRL_FAULT", f"{fault} who=- when={switch}")
    switch.touch()
    if file == "status.json":
        run = start(root, trainer="finish")
        # the end is in the events, and the status waits to be written: nobody is told that it runs
        wait_for(lambda: "COMPLETED" in states(run), 30, "the end of the attempt")
        assert RunStatus.read(run) is None
    else:
        run = create(root, trainer="finish")
        submit_attempt(RunContents.read(run))
        wait_for(lambda: observe(run).state is RunState.COMPLETED, 30, "the end of the run")
        assert not states(run)
    switch.unlink()
    view = wait_ended(run)
    assert view.state is RunState.COMPLETED
    wait_for(lambda: states(run) == ["STARTING", "RUNNING", "STOPPING", "COMPLETED"], 30, "all events")
    wait_for(lambda: read_events(run, kind="reports.caught_up"), 30, "the word that it is over")
    (again,) = read_events(run, kind="reports.caught_up")
    assert again.data["file"].startswith(file)
    assert again.data["dropped"] == 0


# -- signals -------------------------------------------------------------------------------------------------------


def test_a_signal_is_not_lost_with_the_record(root: Path) -> None:
    run = start(root)
    supervisor = wait_running(run).pid
    assert supervisor is not None
    record = run.record_path.read_bytes()
    run.record_path.write_bytes(b"torn")
    os.kill(supervisor, signal.SIGTERM)
    wait_for(lambda: states(run)[-1] == "CANCELLED", 30, "the end of the attempt")
    run.record_path.write_bytes(record)
    view = wait_ended(run)
    assert view.state is RunState.CANCELLED
    assert view.cause is not None
    assert view.cause.message == "cancelled by SIGTERM to the supervisor"


def test_slurms_warning_is_not_lost_with_the_events(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "sick"
    monkeypatch.setenv("LD_PRELOAD", str(build_shim(tmp_path)))
    # no event, no status, no request to save: nothing below the run can be opened for a while
    monkeypatch.setenv("HPCRL_FAULT", f"op=write errno=5 path={root} who=- when={switch}")
    run = start(root, attempts=AttemptPolicy(signal_lead_s=47))
    view = wait_running(run)
    roles = [component.pid for component in view.components if component.pid is not None]
    assert len(roles) == 2
    assert view.pid is not None
    switch.touch()
    os.kill(view.pid, signal.SIGUSR2)
    # the roles end although nothing can be said; then it can, and all is said
    wait_for(lambda: not any(procfs.read_process(pid) for pid in roles), 40, "the end of the roles")
    switch.unlink()
    view = wait_ended(run)
    assert view.state is RunState.FAILED
    assert view.cause is not None
    assert view.cause.kind is CauseKind.TIME_LIMIT
    assert "no state was saved" in view.cause.message
    kinds = [event.kind for event in read_events(run)]
    assert kinds.index("supervisor.warned") < kinds.index("supervisor.saved")


@pytest.mark.parametrize("file", ["complaints/engine-0.json", "failures/engine-0.json"])
def test_a_read_that_hangs_does_not_keep_the_supervisor(root: Path, file: str) -> None:
    """A FIFO in place of what a role has written: its read waits for ever."""
    run = start(root)
    supervisor = wait_running(run).pid
    assert supervisor is not None
    fifo = run.attempt_dir(1) / file
    fifo.parent.mkdir(exist_ok=True)
    os.mkfifo(fifo)
    held = hold_reader(fifo, 20.0)
    os.kill(supervisor, signal.SIGTERM)
    try:
        wait_for(
            lambda: (found := procfs.read_process(supervisor)) is None or found.dead, 15.0, "the end of the supervisor"
        )
    finally:
        os.close(held)
    view = wait_ended(run)
    assert view.state is RunState.CANCELLED
