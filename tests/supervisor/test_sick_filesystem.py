"""A run whose supervisor cannot write what it has to say: it goes on, ends as it should, and says all of it later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_shim import build_shim
from supervisor_testing import create, end_everything, start, wait_ended, wait_for

from hpcrl.runs.events import read_events
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.slurm.submission import submit_attempt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


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
        submit_attempt(run)
        wait_for(lambda: observe(run).state is RunState.COMPLETED, 30, "the end of the run")
        assert not states(run)
    switch.unlink()
    view, _ = wait_ended(run)
    assert view.state is RunState.COMPLETED
    wait_for(lambda: states(run) == ["STARTING", "RUNNING", "STOPPING", "COMPLETED"], 30, "all events")
    wait_for(lambda: read_events(run, kind="reports.caught_up"), 30, "the word that it is over")
    (again,) = read_events(run, kind="reports.caught_up")
    assert again.data["file"].startswith(file)
    assert again.data["dropped"] == 0
