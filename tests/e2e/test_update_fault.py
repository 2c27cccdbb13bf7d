"""One of two engines cannot do what the other can: read a new version, or sample. The run goes on, and says so."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fault_shim import build_shim
from lab import (
    SLOW_RUN,
    Lab,
    after,
    component,
    events,
    last_step,
    lost,
    newest_counters,
    steps,
    wait_for,
    wait_gone,
    wait_step,
)
from observed import status_of

from hpcrl.network.credentials import Credentials
from hpcrl.runs.fleet import FleetView
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentStatus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]

TWO_ENGINES = ("engine.replicas=2", "rollouts.stream_interval=4", *SLOW_RUN)


def engine(run: RunDir) -> ComponentStatus:
    return component(run, "engine")


def health(run: RunDir) -> list[str]:
    """What status calls the engines."""
    return [replica["state"] for replica in status_of(run)["fleet"]["replicas"]]


def recovered(run: RunDir, fault_s: float) -> dict[str, float]:
    """Wait until engine 0 serves again after its restart; seconds from the fault to what followed."""
    (restarting, *_) = wait_for(
        lambda: after(run, fault_s, "component.restarting", role="engine", replica=0), 120, "restart"
    )
    serving = wait_for(
        lambda: after(run, restarting, "engine.weights_updated", engine="engine-0"), 120, "weights in the new engine"
    )
    away = after(run, fault_s, "engine.away", engine="engine-0")
    ready = wait_for(
        lambda: after(run, restarting, "component.state", role="engine", replica=0, state="READY"), 60, "a ready engine"
    )
    times = {"away": min(away), "restarting": restarting, "ready": ready[0], "serving": serving[0]}
    return {name: round(time_s - fault_s, 2) for name, time_s in times.items()}


def rewards(run: RunDir, first: int, last: int) -> float:
    """Mean reward of steps."""
    records = [record.reward_mean for step, record in steps(run).items() if first <= step <= last]
    return round(sum(records) / len(records), 3)


def check_end(lab: Lab, run: RunDir) -> None:
    lab.hpcrl("cancel", run.name, "--yes")
    assert lab.wait_end(run, 60).upper() == "CANCELLED"
    records = steps(run)
    assert list(records) == list(range(1, max(records) + 1))
    assert {record.attempt for record in records.values()} == {1}
    wait_gone(run)


def test_an_update_that_fails_on_one_of_two_engines(lab: Lab, tmp_path: Path, capsys: Any) -> None:
    """First what it reads is torn, for it alone; then it is killed while it reads."""
    switch = tmp_path / "torn"
    fault = f"op=read short=0 delay_us=300000 path={lab.runs_root}/torn/weights/v when={switch} who=engine-0"
    lab.env |= {"LD_PRELOAD": str(build_shim(tmp_path)), "TEST_FAULT": fault}
    # without a node cache each engine reads for itself
    run = lab.submit("torn", "handoff.node_cache=null", *TWO_ENGINES)
    wait_step(run, 20)
    wait_for(lambda: health(run) == ["healthy", "healthy"], 30, "two healthy engines")

    before, fault_s = last_step(run), time.time()
    switch.touch()
    wait_for(lambda: after(run, fault_s, "engine.away", engine="engine-0"), 60, "loss of the engine")
    seen = wait_for(lambda: states if (states := health(run))[0] != "healthy" else None, 10, "word of it in status")
    wait_step(run, last_step(run) + 4)
    wait_for(lambda: after(run, fault_s, "component.restarting", role="engine", replica=0), 60, "restart")
    switch.unlink()
    torn = recovered(run, fault_s)
    wait_step(run, last_step(run) + 2)
    assert seen[1] == "healthy"
    assert lost(run) == {"dropped_engine": 0, "dropped_environment": 0, "dropped_group": 0}
    why = lab.hpcrl("why", run.name, "--events").stdout
    assert "engine 0 could not load version" in why
    assert "engine 0 is restarted (restart 1)" in why
    with capsys.disabled():
        reward = (rewards(run, 1, before), rewards(run, before + 1, last_step(run)))
        print(f"\ntorn for one of two: {torn}, then called {seen[0]}; steps {before} to {last_step(run)}, {reward=}")

    fault_s = time.time()
    switch.touch()

    def loads() -> bool:
        view = FleetView.read(run, 1)
        zero = None if view is None else view.engine(0)
        return zero is not None and zero.loading is not None

    wait_for(loads, 30, "an update of engine 0")
    pid = engine(run).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    switch.unlink()
    killed = recovered(run, fault_s)
    wait_step(run, last_step(run) + 2)
    assert lost(run) == {"dropped_engine": 0, "dropped_environment": 0, "dropped_group": 0}
    # on a slow machine the torn load may have failed before
    assert "engine 0 is restarted (restart 2)" in lab.hpcrl("why", run.name, "--events").stdout
    wait_for(lambda: health(run) == ["healthy", "healthy"], 60, "two healthy engines")
    with capsys.disabled():
        print(f"killed during a load: {killed}; steps {last_step(run)}")
    check_end(lab, run)


def test_an_engine_that_answers_and_samples_nothing_is_restarted(lab: Lab, capsys: Any) -> None:
    """Its requests are held, its updates load, and ``/health`` says 200 all the time."""
    # with pauses of its own the orchestrator would end ours
    run = lab.submit("silent", "engine.pause=none", "supervision.hang_floor_s=10", *TWO_ENGINES)
    wait_step(run, 20)
    wait_for(lambda: health(run) == ["healthy", "healthy"], 30, "two healthy engines")
    fault_s, url = time.time(), f"http://{engine(run).host}:{engine(run).port}"
    headers = Credentials.of_run(run.path, run.attempts()[-1]).headers
    pause = urllib.request.Request(f"{url}/pause?mode=keep&clear_cache=false", b"", headers, method="POST")
    with urllib.request.urlopen(pause, timeout=30) as answer:
        assert json.load(answer)["status"] == "paused"

    def suspect() -> Any:
        (zero, _) = status_of(run)["fleet"]["replicas"]
        return zero if zero["state"] == "suspect" else None

    with urllib.request.urlopen(urllib.request.Request(f"{url}/health", headers=headers), timeout=30) as answer:
        assert answer.status == 200
    zero = wait_for(suspect, 60, "suspicion")
    suspected_s = round(time.time() - fault_s, 2)
    assert zero["why"].startswith("no token for")
    times = recovered(run, fault_s)
    wait_step(run, last_step(run) + 3)
    (hung,) = events(run, "component.hung")
    assert "no progress for" in hung.data["problem"]
    assert "engine 0 hangs: no progress for" in lab.hpcrl("why", run.name, "--events").stdout
    counters = newest_counters(run)
    with capsys.disabled():
        kept = f"{counters['engine_retries']:.0f} requests went on elsewhere, {counters['tokens_kept']:.0f} tokens kept"
        print(f"\nsilent engine: suspect after {suspected_s}, {times}; {kept}")
    assert lost(run) == {"dropped_engine": 0, "dropped_environment": 0, "dropped_group": 0}
    check_end(lab, run)
