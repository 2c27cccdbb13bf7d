"""Engines that are killed, stopped, or fail at each start, and a trainer rank that is stopped, in real runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
from lab import SMALL_RUN, Lab, component, events, processes, steps, wait_step
from patience import wait_for

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentStatus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

TWO_ENGINES = ("engine.replicas=2", "checkpoint.every_steps=4", *SMALL_RUN)
SOON_HUNG = "supervision.hang_floor_s=15"


def engine(run: RunDir, replica: int = 0) -> ComponentStatus:
    return component(run, "engine", replica)


def signal_engine(run: RunDir, number: signal.Signals) -> float:
    pid = engine(run).pid
    assert pid is not None
    os.kill(pid, number)
    return time.time()


def wait_restarted(run: RunDir, fault_s: float) -> dict[str, float]:
    """Seconds from the fault to each of its consequences."""
    wait_for(lambda: engine(run).restarts == 1 and engine(run).state == "READY", 120, "restart")
    restarting = events(run, "component.restarting")[0].time_s

    def served() -> list[float]:
        updates = [e.time_s for e in events(run, "engine.weights_updated") if e.data["engine"] == "engine-0"]
        return [time_s for time_s in updates if time_s > restarting]

    wait_for(served, 60, "weights in the new engine")
    away = [e.time_s for e in events(run, "engine.away") if e.data["engine"] == "engine-0"]
    ready = engine(run).ready_at_s
    assert ready is not None
    times = {"away": min(away), "restarting": restarting, "ready": ready, "serving": min(served())}
    return {name: round(time_s - fault_s, 2) for name, time_s in times.items()}


def check_goes_on(lab: Lab, run: RunDir) -> None:
    """The run trains on; its user ends it. All steps are there, of one attempt, and no rollout was lost."""
    wait_step(run, max(steps(run)) + 4)
    lab.hpcrl("cancel", run.name, "--yes")
    assert lab.wait_end(run, 60).upper() == "CANCELLED"
    records = steps(run)
    assert list(records) == list(range(1, max(records) + 1))
    assert {record.attempt for record in records.values()} == {1}
    dropped = {name: value for name, value in counters(run).items() if name.startswith("dropped")}
    assert {dropped[name] for name in ("dropped_engine", "dropped_environment", "dropped_group")} == {0}
    assert processes(run) == []


def counters(run: RunDir) -> dict[str, float]:
    return max(steps(run).values(), key=lambda record: record.step).rollouts


def test_a_killed_engine_is_restarted_and_the_run_goes_on(lab: Lab, capsys: Any) -> None:
    run = lab.submit("killed", "trainer.steps=4000", *TWO_ENGINES)
    wait_step(run, 4)
    times = wait_restarted(run, signal_engine(run, signal.SIGKILL))
    with capsys.disabled():
        print(f"\nkilled engine: {times}")
    check_goes_on(lab, run)
    status = lab.json("status", run.name)
    assert [c["restarts"] for c in status["components"] if c["role"] == "engine"] == [1, 0]
    why = lab.hpcrl("why", run.name, "--events").stdout
    assert "engine 0 was killed by SIGKILL; engine 0 is restarted (restart 1)" in why


def test_a_stopped_engine_is_found_dumped_and_restarted(lab: Lab, capsys: Any) -> None:
    run = lab.submit("stopped", "trainer.steps=4000", SOON_HUNG, *TWO_ENGINES)
    wait_step(run, 4)
    times = wait_restarted(run, signal_engine(run, signal.SIGSTOP))
    with capsys.disabled():
        print(f"\nstopped engine: {times}")
    (hung,) = events(run, "component.hung")
    assert "has not answered" in hung.data["problem"]
    assert hung.data["frames"], (run.path / hung.data["dumps"][0]).read_text()
    why = lab.hpcrl("why", run.name, "--events").stdout
    assert hung.data["dumps"][0] in why
    check_goes_on(lab, run)


def test_an_engine_that_fails_at_each_start_ends_the_run(lab: Lab) -> None:
    run = lab.submit("looping", "trainer.steps=4000", "supervision.engine.max_restarts=2", *TWO_ENGINES)
    wait_step(run, 2)
    killed: set[int] = set()

    def kill_each_life() -> bool:
        life = engine(run)
        if life.state in ("STARTING", "READY") and life.pid is not None and life.pid not in killed:
            killed.add(life.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(life.pid, signal.SIGKILL)
        return lab.state(run).upper() == "FAILED"

    wait_for(kill_each_life, 90, "end of run")
    why = lab.json("why", run.name)
    assert why["cause"]["message"] == "engine 0 was killed by SIGKILL; it was restarted 2 times and did not stay"
    assert (why["cause"]["role"], why["cause"]["replica"]) == ("engine", 0)
    assert processes(run) == []


def test_a_stopped_trainer_rank_fails_the_attempt_with_its_stack(lab: Lab) -> None:
    run = lab.submit("rank", "trainer.steps=4000", "trainer.ranks=2", SOON_HUNG, *TWO_ENGINES)
    wait_step(run, 6)
    (rank,) = [p for p in processes(run) if p.environ().get("RANK") == "1" and "hpcrl.trainer" in p.cmdline()]
    rank.send_signal(signal.SIGSTOP)
    assert lab.wait_end(run, 120).upper() == "FAILED"
    why = lab.json("why", run.name)
    assert why["cause"]["kind"] == "hung"
    assert f"stopped by a signal: pid {rank.pid}" in why["cause"]["message"]
    assert why["log"] == "attempts/0001/dumps/trainer-0.txt"
    assert why["last_words"]
    assert processes(run) == []
