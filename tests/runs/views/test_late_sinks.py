"""`hpcrl status` says which sinks lack steps, whatever is the reason: failed, hanging, without a network."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from runs_testing import START_S, Hpcrl, make_run, write_steps

from hpcrl.config.outlets import SinkConfig
from hpcrl.runs.metrics import read_newest
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.late_sinks import sink_warnings


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = make_run(tmp_path)
    plan = made.plan().model_copy(update={"sinks": (SinkConfig(name="board", sink="tensorboard"),)})
    made.plan_path.write_text(plan.model_dump_json())
    made.sinks_dir.mkdir()
    return made


def given(run: RunDir, last_step: int, time_s: float) -> None:
    path = run.sinks_dir / "board.json"
    path.write_text(json.dumps({"last_step": last_step, "last_version": 3}))
    os.utime(path, (time_s, time_s))


def test_a_sink_that_lacks_steps_is_a_warning(run: RunDir, hpcrl: Hpcrl) -> None:
    assert sink_warnings(run) == []
    write_steps(run, 9)
    newest = read_newest(run)
    assert newest is not None
    given(run, 9, newest.time_s)
    assert sink_warnings(run) == []
    # a step that was just made is on its way
    given(run, 8, newest.time_s - 1000.0)
    assert sink_warnings(run, now_s=newest.time_s + 1.0) == []
    given(run, 4, newest.time_s - 1000.0)
    (warning,) = sink_warnings(run, now_s=newest.time_s + 1.0)
    assert warning == (
        f"sink board has 4 of 9 steps; the reason may be in {run.sinks_dir}/board.log; "
        "after the end of the run, hpcrl sinks send run-1 sends the rest"
    )
    # of a run that has ended, too
    given(run, 8, newest.time_s)
    assert "sink board has 8 of 9 steps" in json.loads(hpcrl("status", str(run.path), "--json")[1])["warnings"][-1]
    assert "warning: sink board has 8 of 9 steps" in " ".join(hpcrl("status", str(run.path))[1].split())


def test_one_that_never_began_has_none(run: RunDir) -> None:
    write_steps(run, 3)
    os.utime(run.sinks_dir, (START_S, START_S))
    (warning,) = sink_warnings(run)
    assert warning.startswith("sink board has 0 of 3 steps")
