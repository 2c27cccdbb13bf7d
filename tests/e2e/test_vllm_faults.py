"""The quickstart with real vLLM engines, vllm-router and Mooncake Store. Each fails in turn; it learns all the same.

One run for all of it, because two engines take a minute to start. Whatever is killed or stopped, the run goes on, says
what happened, and the part is back in its place.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from lab import HPCRL, ROOT, Lab, component, events, last_step, lost, steps, wait_gone, wait_step
from patience import wait_for
from vllm_environment import VLLM_PYTHON

from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(3600)]

#: so many steps the quickstart is left alone, and so many lie between evaluations
ALONE, EVALUATED = 8, 12
#: how long a rollout waits for its environment: while an engine starts anew, the run would take the processors from it
LATENCY = "latency: {median_s: 9.0}"
SETTINGS = (
    "trainer.steps=100000",
    f"environments=[{{name: reverse, kind: words, task: reverse, {LATENCY}}}, "
    f"{{name: calculator, kind: calculator, {LATENCY}}}]",
    # it falls with the number of steps, and here it does not
    "trainer.optimizer.learning_rate=7e-4",
    f"evaluation.every_steps={EVALUATED}",
    "evaluation.prompts=32",
    "orchestrator.wait_timeout_s=1200",
    # an engine or a router that does not answer at all is given up after so long
    "supervision.hang_floor_s=20",
)
FLEET = {("engine", 0), ("engine", 1), ("router", 0), ("store", 0)}


@pytest.fixture
def fleet(tmp_path: Path, vllm_start_model: Path) -> Iterator[tuple[Lab, RunDir]]:
    """A run with some steps behind it."""
    lab = Lab(tmp_path, vllm_start_model)
    site = {"name": "site", "kind": "local", "paths": {"runs_root": str(lab.runs_root)}}
    site |= {"limits": {"start_timeout_s": 900, "stop_timeout_s": 20}, "vllm_python": str(VLLM_PYTHON)}
    profile = tmp_path / "site.yaml"
    profile.write_text(yaml.safe_dump(site))
    sets = tuple(part for s in (f"model.path={lab.model}", *SETTINGS) for part in ("--set", s))
    command = [HPCRL, "submit", "quickstart_vllm", "-c", str(profile), "--name", "fleet", *sets]
    subprocess.run(command, cwd=ROOT, env=lab.env, check=True, capture_output=True, timeout=1200)
    run = RunDir(lab.runs_root / "fleet")
    try:
        wait_step(run, 1, 900)
        wait_step(run, ALONE + 1, 300)
        yield lab, run
    finally:
        lab.hpcrl("cancel", run.name, "--yes", check=False)
        lab.wait_end(run, 120)
    wait_gone(run)


def pid_of(run: RunDir, role: str, replica: int = 0) -> int:
    pid = component(run, role, replica).pid
    assert pid is not None
    return pid


def recover(run: RunDir, role: str, replica: int, fault_s: float) -> dict[str, float]:
    """Wait until a replica is back; seconds from the fault to what followed."""

    def after(kind: str, **wanted: Any) -> list[float]:
        found = [e for e in events(run, kind) if e.time_s > fault_s]
        return [e.time_s for e in found if all(e.data.get(name) == value for name, value in wanted.items())]

    wait_for(lambda: after("component.restarting", role=role, replica=replica), 300, f"restart of {role}")
    wait_for(lambda: after("component.state", role=role, replica=replica, state="READY"), 600, f"a new {role}")
    times = {
        "restarting": after("component.restarting", role=role, replica=replica)[0],
        "ready": after("component.state", role=role, replica=replica, state="READY")[0],
    }
    if role == "engine":
        name = f"engine-{replica}"
        wait_for(lambda: after("router.engine_added", engine=name), 300, f"{name} in the router")
        times |= {"removed": after("router.engine_removed", engine=name)[0]}
        times |= {"serving": after("router.engine_added", engine=name)[0]}
    elif role == "router":
        wait_for(lambda: after("router.back"), 120, "the router's return")
        times |= {"serving": after("router.back")[0]}
    step = last_step(run)
    wait_step(run, step + 3, 600)
    return {name: round(time_s - fault_s, 1) for name, time_s in times.items()}


def check(lab: Lab, run: RunDir, words: str, times: dict[str, float], capsys: Any) -> None:
    """The run goes on, has lost no rollout, and says what happened."""
    assert words in lab.hpcrl("why", run.name, "--events").stdout
    came_to_nothing = lost(run)
    with capsys.disabled():
        print(f"\n{words}: {times}, lost {came_to_nothing}")
    assert set(came_to_nothing.values()) == {0}
    status = lab.json("status", run.name)
    ready = {(c["role"], c["replica"]) for c in status["components"] if c["state"].upper() == "READY"}
    assert ready >= FLEET


def rewards(run: RunDir) -> list[float]:
    """Of held-out prompts, the start model first."""
    return [event.data["reward"] for event in events(run, "evaluation")]


def versions(run: RunDir, engine: str) -> set[int]:
    """Those that an engine has served."""
    found = (event.data for event in events(run, "engine.weights_updated"))
    return {data["version"] for data in found if data["engine"] == engine}


def the_quickstart_runs(run: RunDir) -> None:
    # all went through the router, to both engines
    assert {event.data["engine"] for event in events(run, "router.engine_added")} == {"engine-0", "engine-1"}
    # both took versions while rollouts were in flight; one that the next has overtaken is left out
    for engine in ("engine-0", "engine-1"):
        wait_for(lambda engine=engine: max(versions(run, engine)) >= ALONE, 60, f"version {ALONE} in {engine}")
        assert len(versions(run, engine)) > ALONE // 2
    records = steps(run)
    # tokens of the trainer's own version have the trainer's log-probabilities
    fresh = [r.mismatch_kl_by_lag["0"] for r in records.values() if "0" in r.mismatch_kl_by_lag]
    assert fresh
    assert max(fresh) < 1e-5


def the_pool_has_a_segment_of_each_engine(lab: Lab, run: RunDir) -> None:
    pool = lab.json("store", "status", run.name)["pool"]
    assert [segment["capacity_bytes"] for segment in pool["segments"]] == [1 << 28, 1 << 28]
    assert {event.writer for event in events(run, "store.canary")} == {"engine-0", "engine-1"}


def a_killed_router_is_restarted_on_its_port(lab: Lab, run: RunDir, capsys: Any) -> None:
    port = component(run, "router").port
    fault_s = time.time()
    os.kill(pid_of(run, "router"), signal.SIGKILL)
    times = recover(run, "router", 0, fault_s)
    assert component(run, "router").port == port
    check(lab, run, "router 0 was killed by SIGKILL; router 0 is restarted", times, capsys)


def a_killed_master_is_restarted_and_segments_come_back(lab: Lab, run: RunDir, capsys: Any) -> None:
    (master,) = psutil.Process(pid_of(run, "store")).children()
    fault_s = time.time()
    master.kill()
    times = recover(run, "store", 0, fault_s)
    wait_for(lambda: len(lab.json("store", "status", run.name)["pool"]["segments"]) == 2, 120, "both segments")
    times["segments"] = round(time.time() - fault_s, 1)
    check(lab, run, "mooncake_master ended with exit code -9", times, capsys)


def a_killed_engine_comes_back_behind_the_router(lab: Lab, run: RunDir, capsys: Any) -> None:
    step = last_step(run)
    fault_s = time.time()
    os.kill(pid_of(run, "engine", 1), signal.SIGKILL)
    times = recover(run, "engine", 1, fault_s)
    assert last_step(run) > step
    lost = [e.time_s for e in events(run, "store.segment_lost") if e.time_s > fault_s]
    assert lost
    times["segment_lost"] = round(lost[0] - fault_s, 1)
    assert "left the KV pool with its blocks (segments left: 1)" in lab.hpcrl("why", run.name, "--events").stdout
    check(lab, run, "engine 1 was killed by SIGKILL; engine 1 is restarted", times, capsys)


def a_stopped_engine_is_found_and_restarted(lab: Lab, run: RunDir, capsys: Any) -> None:
    fault_s = time.time()
    os.kill(pid_of(run, "engine", 0), signal.SIGSTOP)
    times = recover(run, "engine", 0, fault_s)
    check(lab, run, "engine 0 hangs: it has not answered for", times, capsys)


def a_stopped_router_is_found_and_restarted(lab: Lab, run: RunDir, capsys: Any) -> None:
    fault_s = time.time()
    os.kill(pid_of(run, "router"), signal.SIGSTOP)
    times = recover(run, "router", 0, fault_s)
    check(lab, run, "router 0 hangs: it has not answered for", times, capsys)


def test_the_quickstart_learns_although_each_part_fails(fleet: tuple[Lab, RunDir], capsys: Any) -> None:
    """One after the other, in one run."""
    lab, run = fleet
    the_quickstart_runs(run)
    the_pool_has_a_segment_of_each_engine(lab, run)
    a_killed_router_is_restarted_on_its_port(lab, run, capsys)
    a_killed_master_is_restarted_and_segments_come_back(lab, run, capsys)
    a_killed_engine_comes_back_behind_the_router(lab, run, capsys)
    a_stopped_engine_is_found_and_restarted(lab, run, capsys)
    a_stopped_router_is_found_and_restarted(lab, run, capsys)
    before, *after = rewards(run)
    with capsys.disabled():
        print(f"\nreward of held-out prompts {before:.3f}, then every {EVALUATED} steps {[round(r, 3) for r in after]}")
    # the mean, because a single evaluation of a policy that goes on moving is by chance
    assert sum(after) / len(after) >= before + 0.1
