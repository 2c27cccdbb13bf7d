"""Real vLLM engines that are lost while answers are long: what goes on, what is kept, and what `why` says.

Runs are small and learn nothing: the start model has seen one batch, so that answers are a hundred tokens of noise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fault_shim import build_shim
from lab import (
    HPCRL,
    ROOT,
    SMALL_RUN,
    Lab,
    after,
    component,
    last_step,
    lost,
    newest_counters,
    steps,
    wait_gone,
    wait_step,
)
from patience import wait_for
from vllm_environment import VLLM_PYTHON

from hpcrl.runs.fleet import EngineView, FleetView
from hpcrl.runs.rundir import RunDir
from hpcrl.weights.lifetime.leases import ReaderWatch

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(3600)]

INTERVAL = 8
SETTINGS = (
    *SMALL_RUN,
    "trainer.steps=100000",
    # an answer to the calculator's first turn could leave no room for the second
    "environments=[{name: reverse, kind: words, task: reverse}]",
    "engine.max_model_len=512",
    "rollouts.sampling.max_new_tokens=400",
    f"rollouts.stream_interval={INTERVAL}",
    "engine.kv_store=null",
    "orchestrator.wait_timeout_s=1200",
)
SIDES = ("engine.replicas=1", "engine.prefill={replicas: 1, nodes: 1}", "engine.decode={replicas: 1, nodes: 1}")
Submit = Callable[..., RunDir]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = Lab(tmp_path, tmp_path / "model")
    command = [HPCRL, "warmup", "quickstart_vllm", "--output", lab.model, "--set", "model.warmup.steps=1"]
    subprocess.run(command, cwd=ROOT, env=lab.env, check=True, capture_output=True, timeout=1200)
    return lab


@pytest.fixture
def torn(lab: Lab, tmp_path: Path) -> Path:
    """While this file exists, engine 0 reads nothing of what the run ``two`` publishes: files end where they begin."""
    switch = tmp_path / "torn"
    fault = f"op=read short=0 path={lab.runs_root}/two/weights/v when={switch} who=engine-0"
    lab.env |= {"LD_PRELOAD": str(build_shim(tmp_path)), "TEST_FAULT": fault}
    return switch


@pytest.fixture
def submit(lab: Lab, tmp_path: Path) -> Iterator[Submit]:
    """Starts a run with real engines, which ends with the test."""
    limits = {"start_timeout_s": 900, "stop_timeout_s": 20}
    site = {"name": "site", "kind": "local", "paths": {"runs_root": str(lab.runs_root)}, "limits": limits}
    profile = tmp_path / "site.yaml"
    profile.write_text(yaml.safe_dump(site | {"vllm_python": str(VLLM_PYTHON)}))
    runs: list[RunDir] = []

    def start(name: str, *settings: str) -> RunDir:
        sets = [part for s in (f"model.path={lab.model}", *SETTINGS, *settings) for part in ("--set", s)]
        command = [HPCRL, "submit", "quickstart_vllm", "-c", str(profile), "--name", name, *sets]
        done = subprocess.run(command, cwd=ROOT, env=lab.env, check=False, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        runs.append(RunDir(lab.runs_root / name))
        wait_step(runs[-1], 2, 900)
        return runs[-1]

    yield start
    for run in runs:
        lab.hpcrl("cancel", run.name, "--yes", check=False)
        lab.wait_end(run, 120)
        wait_gone(run)


def kill(run: RunDir, role: str, replica: int = 0, *, busy: bool = False) -> float:
    """Kill -9 the server of a replica; when that was. ``busy``: it has requests then, because it stood still before."""
    pid = component(run, role, replica).pid
    assert pid is not None
    if busy:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
    now_s = time.time()
    os.kill(pid, signal.SIGKILL)
    return now_s


def engine(run: RunDir, role: str, replica: int = 0) -> EngineView | None:
    """What the orchestrator says of an engine."""
    view = FleetView.read(run, 1)
    found = [] if view is None else [e for e in view.engines if (e.role, e.replica) == (role, replica)]
    return found[0] if found else None


def acknowledged(run: RunDir) -> dict[str, int]:
    """The version that each reader has loaded last."""
    readers = ReaderWatch(run.weights_dir, expiry_s=60.0).observe()
    return {reader.reader: reader.acknowledged for reader in readers if reader.acknowledged is not None}


def test_an_engine_killed_in_long_answers_and_an_update_that_fails_on_one_of_two(
    torn: Path, lab: Lab, submit: Submit, capsys: Any
) -> None:
    """Engine 1 is killed: engine 0 goes on from the tokens that had arrived.

    When engine 1 serves again, engine 0 cannot read what engine 1 can: it is left out, and restarted. No rollout is
    lost by either.
    """
    # without a node cache each engine reads for itself
    run = submit("two", "engine.replicas=2", "handoff.node_cache=null")
    before = newest_counters(run)

    def busy() -> bool:
        found = engine(run, "engine", 1)
        return found is not None and bool(found.running) and found.running >= 8 and bool(found.tokens_per_s)

    wait_for(busy, 120, "work of engine 1")
    fault_s = kill(run, "engine", 1)
    wait_for(lambda: after(run, fault_s, "router.engine_removed", engine="engine-1"), 60, "the router without engine 1")
    wait_step(run, last_step(run) + 2, 300)
    now = newest_counters(run)
    assert not after(run, fault_s, "component.state", role="engine", replica=1, state="READY")
    retries, kept = (now[name] - before[name] for name in ("engine_retries", "tokens_kept"))
    with capsys.disabled():
        print(f"\nengine 1 killed: {retries:.0f} requests went on elsewhere, {kept:.0f} tokens kept")
    assert retries >= 1
    # of each at least one part, on average
    assert kept >= INTERVAL * retries
    nothing_is_lost(run)
    assert "engine 1 was killed by SIGKILL; engine 1 is restarted" in lab.hpcrl("why", run.name, "--events").stdout

    times = serves_again(run, fault_s, "engine", 1)
    wait_for(lambda: acknowledged(run).keys() == {"engine-0", "engine-1"}, 120, "two readers of the versions")
    step, fault_s = last_step(run), time.time()
    torn.touch()
    wait_for(lambda: after(run, fault_s, "component.restarting", role="engine", replica=0), 300, "restart of engine 0")
    restarted_s = round(time.time() - fault_s, 1)
    wait_step(run, last_step(run) + 1, 300)
    with capsys.disabled():
        print(
            f"engine 1 served again: {times}; torn for engine 0: restarted after {restarted_s}, steps {step} to"
            f" {last_step(run)}"
        )
    # a refusal is not a loss: away once, when it was given up
    assert len(after(run, fault_s, "engine.away", engine="engine-0")) == 1
    assert not after(run, fault_s, "engine.away", engine="engine-1")
    assert last_step(run) > step
    why = lab.hpcrl("why", run.name, "--events").stdout
    assert "engine 0 could not load version" in why
    assert "engine 0 is restarted" in why
    nothing_is_lost(run)


def serves_again(run: RunDir, fault_s: float, role: str, replica: int = 0) -> dict[str, float]:
    """Wait until a replica was restarted and has the newest weights; seconds from the fault to what followed."""
    name, times = f"{role}-{replica}", {}
    wanted = {
        "restarting": ("component.restarting", {"role": role, "replica": replica}),
        "ready": ("component.state", {"role": role, "replica": replica, "state": "READY"}),
        "loaded": ("engine.weights_updated", {"engine": name}),
        "routed": ("router.engine_added", {"engine": name}),
    }
    for what, (kind, data) in wanted.items():
        begin_s = fault_s + max(times.values(), default=0.0)
        found = wait_for(lambda b=begin_s, k=kind, d=data: after(run, b, k, **d), 600, f"{kind} of {name}")
        times[what] = found[0] - fault_s
    return {what: round(seconds, 1) for what, seconds in times.items()}


def nothing_is_lost(run: RunDir) -> None:
    assert lost(run) == {"dropped_engine": 0, "dropped_environment": 0, "dropped_group": 0}
    assert {record.attempt for record in steps(run).values()} == {1}
    # kept tokens have the log-probabilities that the trainer has for them
    fresh = [r.mismatch_kl_by_lag["0"] for r in steps(run).values() if "0" in r.mismatch_kl_by_lag]
    assert max(fresh) < 1e-5


def test_a_killed_engine_of_two_sides_comes_back(lab: Lab, submit: Submit, capsys: Any) -> None:
    """Prefill, then decode: rollouts wait until it is back with the newest weights; none is lost, what was in flight
    begins anew."""
    run = submit("sides", *SIDES)
    for role in ("prefill", "decode"):
        wait_for(lambda: (found := engine(run, "decode")) is not None and bool(found.running), 120, "work of decode")
        before, step = newest_counters(run), last_step(run)
        fault_s = kill(run, role, busy=True)
        times = serves_again(run, fault_s, role)
        # Mooncake's connector knows prefill by an identity of each start, which the router asks for at its own
        assert bool(after(run, fault_s, "component.restarting", role="router", replica=0)) == (role == "prefill")
        wait_step(run, last_step(run) + 3, 600)
        now = newest_counters(run)
        asked = {name: now[name] - before[name] for name in ("engine_requests", "engine_retries", "tokens_kept")}
        with capsys.disabled():
            print(f"\n{role} killed: {times}, {asked}, steps {step} to {last_step(run)}")
        # what is given up where decode is lost is asked for again, and is not a retry of a request
        assert role == "decode" or asked["engine_retries"] >= 1
        assert asked["tokens_kept"] == 0
        nothing_is_lost(run)
        words = f"{role} 0 was killed by SIGKILL; {role} 0 is restarted"
        assert words in lab.hpcrl("why", run.name, "--events").stdout
