"""Local sweeps of real runs: a queue that is killed at the worst moments starts each member exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fault_shim import build_shim
from patience import wait_for
from sweep_lab import (
    GRID,
    SweepLab,
    kill_queue,
    launched,
    members,
    most_at_once,
    queue_processes,
    result_of,
    starts,
    wait_ended,
)

from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.status import RunState

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: ends the process that starts members at a point of it; members are real runs all the same
KILLED = """
import os, signal, sys
from pathlib import Path
from hpcrl.submit import submission
from hpcrl.sweeps import queue
from hpcrl.sweeps.queue_process import work
from hpcrl.sweeps.sweep_files import SweepDir

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

module = {"queue": queue, "submission": submission}[sys.argv[2]]
setattr(module, sys.argv[3], die)
work(SweepDir(Path(sys.argv[1])))
"""


def test_members_are_ordinary_runs_of_which_few_run_at_a_time(lab: SweepLab) -> None:
    sweep = lab.sweep("s", *GRID, "--seeds", "2", "--max-running", "2", "--tag", "night")
    assert lab.hpcrl("sweep", "wait", "s").returncode == 0
    runs = members(sweep)
    assert [run.name for run in runs] == ["s-01", "s-02", "s-03", "s-04"]
    assert [starts(run) for run in runs] == [(1, 1)] * 4
    assert most_at_once(runs) == 2
    assert [run.recipe().trainer.optimizer.learning_rate for run in runs] == [1e-4, 1e-4, 2e-4, 2e-4]
    assert [run.recipe().seed for run in runs] == [0, 1, 0, 1]
    assert not queue_processes(sweep)
    rows = lab.json("ls", "--tag", "night", "--tag", "s")["runs"]
    assert sorted(row["name"] for row in rows) == [run.name for run in runs]
    assert rows[0]["swept"] == {"trainer.optimizer.learning_rate": "0.0002", "seed": "1"}
    assert {row["sweep"] for row in rows} == {"s"}
    assert not lab.json("ls", "--tag", "day")["runs"]
    table = lab.hpcrl("sweep", "status", "s").stdout
    assert "4 COMPLETED, at most 2 at a time" in table
    assert [line.split()[0] for line in table.splitlines() if line.startswith("s-")] == [run.name for run in runs]
    (listed,) = json.loads(lab.hpcrl("sweep", "ls", "--json").stdout)
    assert (listed["sweep"], listed["states"]) == ("s", {"COMPLETED": 4})
    taken = lab.hpcrl("submit", "quickstart", "--set", "job.payload=probe", "--name", "s", *GRID, check=False)
    assert taken.returncode == 2
    assert "exists" in taken.stderr
    # when its runs are gone, the name is free
    lab.hpcrl("rm", *(run.name for run in runs), "--yes")
    assert lab.hpcrl("submit", "quickstart", "--set", "job.payload=probe", "--name", "s", *GRID, "--dry-run")


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("queue", "submit_attempt"),  # the member's claim is written, and nothing of it runs
        ("submission", "write_submission"),  # its supervisor runs, and nothing says so
    ],
)
def test_a_queue_killed_in_the_middle_of_a_start_loses_and_doubles_none(
    module: str, function: str, lab: SweepLab
) -> None:
    sweep = lab.sweep("s", *GRID, "--after", _hold(lab))
    kill_queue(sweep)
    lab.hpcrl("cancel", "first", "--yes")
    assert lab.python(KILLED, sweep.path, module, function) == -signal.SIGKILL
    first = members(sweep)[0]
    assert not RunRecord.read(first).submissions
    assert bool(launched(first)) is (module == "submission")
    assert result_of(sweep).idle
    assert "hpcrl sweep resume s" in lab.hpcrl("sweep", "status", "s").stdout
    lab.hpcrl("sweep", "resume", "s")
    assert wait_ended(sweep).counts == {"COMPLETED": 2}
    assert [starts(run) for run in members(sweep)] == [(1, 1)] * 2
    assert most_at_once(members(sweep)) == 1


#: a queue that tries again soon
IMPATIENT = """
import logging, sys
from pathlib import Path
from hpcrl.sweeps import queue
from hpcrl.sweeps.queue_process import work
from hpcrl.sweeps.sweep_files import SweepDir

logging.basicConfig(level=logging.INFO)
queue._RETRY_S = 0.5
sys.exit(work(SweepDir(Path(sys.argv[1]))))
"""


def test_a_member_that_a_full_disk_refuses_is_started_later(lab: SweepLab, tmp_path: Path) -> None:
    sweep = lab.sweep("s", *GRID, "--after", _hold(lab))
    kill_queue(sweep)
    lab.hpcrl("cancel", "first", "--yes")
    switch = tmp_path / "full"
    switch.touch()
    fault = f"op=change errno=28 path=/s-01/submitit/ when={switch}"
    env = {**lab.env, "LD_PRELOAD": str(build_shim(tmp_path)), "HPCRL_FAULT": fault}
    queue = subprocess.Popen([sys.executable, "-P", "-c", IMPATIENT, str(sweep.path)], cwd=lab.root, env=env)
    try:
        # the other member is not kept waiting
        second = members(sweep)[1]
        wait_for(lambda: observe(second).state is RunState.COMPLETED, 90.0, "the second member")
        row = result_of(sweep).members[0]
        assert (row.state, starts(members(sweep)[0])) == ("QUEUED", (0, 0))
        assert "No space left on device" in row.problem
        assert "No space left on device" in lab.hpcrl("sweep", "status", "s").stdout
        switch.unlink()
        assert wait_ended(sweep).counts == {"COMPLETED": 2}
        assert queue.wait(120.0) == 0
    finally:
        queue.kill()
        queue.wait()
    assert [starts(run) for run in members(sweep)] == [(1, 1)] * 2


def _hold(lab: SweepLab) -> str:
    """Submit a run that stays until it is cancelled."""
    profile = lab.root.parent / "local.yaml"
    profile.write_text("extends: local\nname: local\nkind: local\nenv: {PROBE_HOLD_S: '600'}\n")
    lab.hpcrl("submit", "quickstart", "--set", "job.payload=probe", "-c", str(profile), "--name", "first")
    return "first"


def test_a_queue_waits_for_a_run_and_is_started_again_where_it_is_killed(lab: SweepLab) -> None:
    sweep = lab.sweep("s", *GRID, "--after", _hold(lab))
    assert "the end of first" in wait_for(lambda: result_of(sweep).waits_for, 30.0, "a queue that waits")
    assert result_of(sweep).counts == {"QUEUED": 2}
    # one queue is enough
    lab.hpcrl("sweep", "resume", "s")
    keeper, worker = queue_processes(sweep)
    worker.kill()
    wait_for(lambda: [p for p in queue_processes(sweep) if p.pid not in (keeper.pid, worker.pid)], 30.0, "another one")
    assert result_of(sweep).counts == {"QUEUED": 2}
    resumed = lab.hpcrl("resume", "s-01", check=False)
    assert resumed.returncode == 2
    assert "its sweep s starts it" in resumed.stderr
    lab.hpcrl("cancel", "first", "--yes")
    assert wait_ended(sweep).counts == {"COMPLETED": 2}
    assert [starts(run) for run in members(sweep)] == [(1, 1)] * 2


def test_a_cancelled_sweep_ends_its_members_and_continues(lab: SweepLab) -> None:
    profile = lab.root.parent / "local.yaml"
    profile.write_text("extends: local\nname: local\nkind: local\nenv: {PROBE_HOLD_S: '600'}\n")
    sweep = lab.sweep("s", *GRID, "--seeds", "2", "-c", str(profile))
    first, second, third, fourth = members(sweep)
    wait_for(lambda: observe(first).state is RunState.RUNNING, 60.0, "the first member")
    # one member by itself: it was not started, and is not
    assert lab.hpcrl("cancel", "s-03", "--yes").stdout == "s-03: CANCELLED\n"
    assert "s-04: CANCELLED" in lab.hpcrl("sweep", "cancel", "s", "--yes").stdout
    result = result_of(sweep)
    assert (result.counts, result.ended, result.cancelled_by != "") == ({"CANCELLED": 4}, True, True)
    assert [starts(run) for run in (first, second, third, fourth)] == [(1, 1), (0, 0), (0, 0), (0, 0)]
    assert "before it was started" in lab.hpcrl("why", "s-04").stdout
    assert not queue_processes(sweep)
    lab.hpcrl("sweep", "resume", "s")
    wait_for(lambda: observe(first).state is RunState.RUNNING, 60.0, "the first member again")
    assert starts(first) == (2, 2)
    assert [observe(run).state.value for run in (second, third, fourth)] == ["QUEUED", "CANCELLED", "QUEUED"]
    # the machine goes down: a member is lost with the queue
    kill_queue(sweep)
    for process in launched(first):
        _kill(process)
    wait_for(lambda: observe(first).state is RunState.LOST, 60.0, "a lost member")
    lab.hpcrl("sweep", "resume", "s")
    wait_for(lambda: starts(first) == (3, 3), 60.0, "its third attempt")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_one_run_waits_for_another(lab: SweepLab) -> None:
    """Without Slurm a queue of this one run waits."""
    name = _hold(lab)
    lab.hpcrl("submit", "quickstart", "--set", "job.payload=probe", "--name", "second", "--after", name)
    assert lab.json("status", "second")["state"] == "QUEUED"
    lab.hpcrl("cancel", name, "--yes")
    assert lab.hpcrl("wait", "second").stdout == "second: COMPLETED\n"
