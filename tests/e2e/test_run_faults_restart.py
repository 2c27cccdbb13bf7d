"""Engines that are killed, stopped, or fail at each start, and a trainer rank that is stopped, in real runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from lab import SLOW_RUN, Lab, SharedRun, component, events, processes, rank_number, steps, wait_gone, wait_step
from patience import wait_for

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentStatus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]

TWO_ENGINES = ("engine.replicas=2", "checkpoint.every_steps=4", *SLOW_RUN)


@pytest.fixture(scope="module")
def shared(shared_lab: Lab) -> SharedRun:
    return SharedRun(shared_lab, "trainer.ranks=2", "supervision.hang_floor_s=15", *TWO_ENGINES)


@pytest.fixture
def run(shared: SharedRun, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    """A run with two engines, two trainer ranks and some steps, which tests of this file share."""
    yield from shared.taken(request)


def engine(run: RunDir, replica: int = 0) -> ComponentStatus:
    return component(run, "engine", replica)


def signal_engine(run: RunDir, number: signal.Signals) -> float:
    pid = engine(run).pid
    assert pid is not None
    fault_s = time.time()
    os.kill(pid, number)
    return fault_s


def wait_restarted(run: RunDir, before: ComponentStatus, fault_s: float) -> dict[str, float]:
    """Seconds from the fault to each of its consequences; ``before``: engine 0 as it was then."""
    wait_for(lambda: engine(run).restarts == before.restarts + 1 and engine(run).state == "READY", 120, "restart")
    restarting = events(run, "component.restarting", since_s=fault_s)[0].time_s

    def of_engine(kind: str, since_s: float) -> list[float]:
        return [e.time_s for e in events(run, kind, since_s=since_s) if e.data["engine"] == "engine-0"]

    serving = wait_for(lambda: of_engine("engine.weights_updated", restarting), 60, "weights in the new engine")
    ready = engine(run).ready_at_s
    assert ready is not None
    away = min(of_engine("engine.away", fault_s))
    times = {"away": away, "restarting": restarting, "ready": ready, "serving": min(serving)}
    return {name: round(time_s - fault_s, 2) for name, time_s in times.items()}


def check_goes_on(run: RunDir, attempt: int) -> None:
    """The run trains on. All steps are there, the attempt is the same, and no rollout was lost."""
    wait_step(run, max(steps(run)) + 4)
    records = steps(run)
    assert list(records) == list(range(1, max(records) + 1))
    assert run.attempts()[-1] == attempt
    dropped = {name: value for name, value in counters(run).items() if name.startswith("dropped")}
    assert {dropped[name] for name in ("dropped_engine", "dropped_environment", "dropped_group")} == {0}


def counters(run: RunDir) -> dict[str, float]:
    return max(steps(run).values(), key=lambda record: record.step).rollouts


def test_a_killed_engine_is_restarted_and_the_run_continues(run: RunDir, shared_lab: Lab, capsys: Any) -> None:
    attempt, before, other = run.attempts()[-1], engine(run), engine(run, 1)
    times = wait_restarted(run, before, signal_engine(run, signal.SIGKILL))
    with capsys.disabled():
        print(f"\nkilled engine: {times}")
    check_goes_on(run, attempt)
    status = shared_lab.json("status", run.name)
    restarts = [before.restarts + 1, other.restarts]
    assert [c["restarts"] for c in status["components"] if c["role"] == "engine"] == restarts
    why = shared_lab.hpcrl("why", run.name, "--events").stdout
    assert f"engine 0 was killed by SIGKILL; engine 0 is restarted (restart {restarts[0]})" in why


def test_a_stopped_engine_is_found_dumped_and_restarted(run: RunDir, shared_lab: Lab, capsys: Any) -> None:
    attempt, before = run.attempts()[-1], engine(run)
    fault_s = signal_engine(run, signal.SIGSTOP)
    times = wait_restarted(run, before, fault_s)
    with capsys.disabled():
        print(f"\nstopped engine: {times}")
    (hung,) = events(run, "component.hung", since_s=fault_s)
    assert "has not answered" in hung.data["problem"]
    assert hung.data["frames"], (run.path / hung.data["dumps"][0]).read_text()
    why = shared_lab.hpcrl("why", run.name, "--events").stdout
    assert hung.data["dumps"][0] in why
    check_goes_on(run, attempt)


def test_a_stopped_trainer_rank_fails_the_attempt_with_its_stack(run: RunDir, shared_lab: Lab) -> None:
    (rank,) = [p for p in processes(run) if rank_number(p) == 1]
    rank.send_signal(signal.SIGSTOP)
    assert shared_lab.wait_end(run, 120).upper() == "FAILED"
    why = shared_lab.json("why", run.name)
    assert why["cause"]["kind"] == "hung"
    assert f"stopped by a signal: pid {rank.pid}" in why["cause"]["message"]
    assert why["log"] == f"attempts/{run.attempts()[-1]:04d}/dumps/trainer-0.txt"
    assert why["last_words"]
    wait_gone(run)


def test_an_engine_that_fails_at_each_start_ends_the_run(lab: Lab) -> None:
    run = lab.submit("looping", "supervision.engine.max_restarts=2", *TWO_ENGINES)
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
    assert why["cause"]["message"] == "engine 0 was killed by SIGKILL; it was restarted 2 times and failed again"
    assert (why["cause"]["role"], why["cause"]["replica"]) == ("engine", 0)
    wait_gone(run)
