"""The quickstart with real vLLM engines on a real Slurm: behind a router, a segment of the KV pool on each node."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from patience import wait_for
from slurm_lab import SlurmLab, events, wait_step
from vllm_environment import VLLM_PYTHON

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.role import Endpoints
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus
from hpcrl.store.admin import StoreAdmin
from hpcrl.store.endpoints import StoreEndpoints

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(3600)]

STEPS = 18
#: in so few steps
LEARNS = (f"trainer.steps={STEPS}", "trainer.optimizer.schedule=constant")
ENGINES = {"engine-0", "engine-1"}


@pytest.fixture
def vllm_lab(tmp_path: Path, vllm_start_model: Path, site: DevCluster) -> Iterator[SlurmLab]:
    """A lab whose engines are vLLM."""
    limits = {"start_timeout_s": 900, "save_timeout_s": 30, "time_limit_h": 24}
    lab = SlurmLab(tmp_path, vllm_start_model, site, vllm_python=str(VLLM_PYTHON), limits=limits)
    yield lab
    lab.end_all()


def submit(lab: SlurmLab, name: str, *settings: str) -> RunDir:
    settings = (f"model.path={lab.model}", "orchestrator.wait_timeout_s=1200", *settings)
    return lab.submit(name, *settings, recipe="quickstart_vllm", small=False)


def addresses(lab: SlurmLab, run: RunDir, role: str) -> dict[str, str]:
    """Where the nodes of a role are, by replica."""
    status = RunStatus.read(run)
    assert status is not None
    known = {node.name: node.address for node in lab.client().nodes()}
    return {f"{c.role}-{c.replica}": known[c.nodes[0]] for c in status.components if c.role == role}


def segments(run: RunDir) -> list[str]:
    """Addresses that give memory to the pool now."""
    return sorted(segment.host for segment in StoreAdmin(StoreEndpoints.read(run, 1).admin).status().segments)


def test_the_quickstart_learns_on_three_nodes(vllm_lab: SlurmLab, capsys: Any) -> None:
    """A heterogeneous job: the trainer's node, and one for each engine."""
    started_s = time.time()
    settings = (*LEARNS, "evaluation.every_steps=0", "evaluation.prompts=32")
    run = submit(vllm_lab, "learns", *settings, "job.layout=hetjob")
    wait_step(run, 1, 900)
    engines = addresses(vllm_lab, run, "engine")
    assert len({*engines.values(), *addresses(vllm_lab, run, "trainer").values()}) == 3
    assert addresses(vllm_lab, run, "router")["router-0"] == addresses(vllm_lab, run, "trainer")["trainer-0"]
    assert segments(run) == sorted(engines.values())
    status = vllm_lab.wait_state(run, ["COMPLETED", "FAILED", "LOST", "CANCELLED"], timeout_s=300)
    assert status["state"] == "COMPLETED", vllm_lab.hpcrl("why", run.name, "--events").stdout
    rewards = [event.data["reward"] for event in events(run, "evaluation")]
    with capsys.disabled():
        print(f"\nreward of held-out prompts {rewards}, {time.time() - started_s:.0f} s in all")
    assert rewards[-1] >= rewards[0] + 0.1
    assert {event.data["engine"] for event in events(run, "router.engine_added")} == ENGINES
    assert {event.writer: event.data["host"] for event in events(run, "store.canary")} == engines
    updates = [event.data for event in events(run, "engine.weights_updated")]
    for engine in ENGINES:
        versions = {u["version"] for u in updates if u["engine"] == engine}
        # one that the next has overtaken is left out
        assert len(versions) > STEPS // 2
        assert max(versions) == STEPS
    counters = read_metrics(run)[-1].rollouts
    assert {counters[name] for name in ("dropped_engine", "dropped_environment", "dropped_group")} == {0}
    vllm_lab.wait_empty()


@pytest.mark.nightly
def test_a_replica_of_two_nodes_learns(vllm_lab: SlurmLab, capsys: Any) -> None:
    """Wide expert parallelism: a rank with half of the experts on each node, each with a server of its own."""
    settings = (*LEARNS, "evaluation.every_steps=0", "evaluation.prompts=32", "engine.replicas=1")
    run = submit(vllm_lab, "wide", *settings, "engine.nodes=2", "job.layout=hetjob")
    wait_step(run, 1, 900)
    status = RunStatus.read(run)
    assert status is not None
    (engine,) = (c for c in status.components if c.role == "engine")
    assert len(engine.nodes) == 2
    (member,) = Endpoints.read(run, 1).fixed("engine")
    known = {node.name: node.address for node in vllm_lab.client().nodes()}
    assert [urlsplit(url).hostname for url in member.servers] == [known[node] for node in engine.nodes]
    assert segments(run) == sorted(known[node] for node in engine.nodes)
    final = vllm_lab.wait_state(run, ["COMPLETED", "FAILED", "LOST", "CANCELLED"], timeout_s=600)
    assert final["state"] == "COMPLETED", vllm_lab.hpcrl("why", run.name, "--events").stdout
    rewards = [event.data["reward"] for event in events(run, "evaluation")]
    logs = run.attempt_dir(1) / "logs"
    log = "".join(path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file())
    with capsys.disabled():
        print(f"\nreward of held-out prompts {rewards}")
    assert rewards[-1] >= rewards[0] + 0.1
    updates = [event.data["version"] for event in events(run, "engine.weights_updated")]
    assert max(updates) == STEPS
    # each read what its own experts need
    assert re.search(r"other ranks' [1-9]", log)
    counters = read_metrics(run)[-1].rollouts
    assert {counters[name] for name in ("dropped_engine", "dropped_environment", "dropped_group")} == {0}
    vllm_lab.wait_empty()


@pytest.mark.nightly
def test_engines_on_the_trainers_node_learn(vllm_lab: SlurmLab, capsys: Any) -> None:
    """One node for all roles: trainer and engines are steps with parts of it, and both engines give to the pool."""
    settings = (*LEARNS, "evaluation.every_steps=0", "evaluation.prompts=32", "engine.placement=shared_node")
    run = submit(vllm_lab, "together", *settings)
    status = vllm_lab.wait_state(run, ["COMPLETED", "FAILED", "LOST", "CANCELLED"], timeout_s=900)
    assert status["state"] == "COMPLETED", vllm_lab.hpcrl("why", run.name, "--events").stdout
    assert len({node for c in status["components"] for node in c["nodes"]}) == 1
    rewards = [event.data["reward"] for event in events(run, "evaluation")]
    with capsys.disabled():
        print(f"\nreward of held-out prompts {rewards}")
    assert rewards[-1] >= rewards[0] + 0.1
    assert {event.data["engine"] for event in events(run, "router.engine_added")} == ENGINES
    updates = [event.data for event in events(run, "engine.weights_updated")]
    assert {engine: max(u["version"] for u in updates if u["engine"] == engine) for engine in ENGINES} == dict.fromkeys(
        ENGINES, STEPS
    )
    vllm_lab.wait_empty()


@pytest.mark.nightly
def test_a_lost_node_takes_its_segment_and_the_run_continues(vllm_lab: SlurmLab, capsys: Any) -> None:
    """Engines with jobs of their own: the node of one has a power failure."""
    small = ("rollouts.rollouts_per_step=16", "rollouts.group_size=4", "rollouts.max_in_flight=32")
    small += ("trainer.steps=100000", "evaluation.every_steps=0", "evaluation.prompts=4")
    run = submit(vllm_lab, "loses", *small, "job.layout=elastic", "job.min_replicas=2")
    wait_step(run, 3, 900)
    wait_for(lambda: len(segments(run)) == 2, 60, "both segments")
    status = RunStatus.read(run)
    assert status is not None
    (node,) = next(c.nodes for c in status.components if (c.role, c.replica) == ("engine", 1))
    address = addresses(vllm_lab, run, "engine")["engine-1"]
    fault_s = time.time()
    vllm_lab.cluster.kill_node(node)
    try:

        def after(kind: str, timeout_s: float, **wanted: Any) -> float:
            """Seconds from the fault to an event."""

            def look() -> list[float]:
                found = (e for e in events(run, kind) if e.time_s > fault_s)
                return [e.time_s for e in found if all(e.data.get(name) == value for name, value in wanted.items())]

            return round(wait_for(look, timeout_s, f"{kind} {wanted}")[0] - fault_s, 1)

        times = {"removed": after("router.engine_removed", 60, engine="engine-1")}
        times["lost"] = after("replica.lost", 60, replica=1)
        times["segment_lost"] = after("store.segment_lost", 60)
        assert address not in segments(run)
        step = read_metrics(run)[-1].step
        wait_step(run, step + 2, 300)
        # Slurm requeues the engine's job, on another node
        times["restarted"] = after("component.state", 120, role="engine", replica=1, state="STARTING")
        times["serving"] = after("router.engine_added", 600, engine="engine-1")
    finally:
        vllm_lab.cluster.revive_node(node)
    wait_for(lambda: len(segments(run)) == 2, 60, "both segments")
    assert address not in segments(run)
    step = read_metrics(run)[-1].step
    wait_step(run, step + 3, 300)
    counters = read_metrics(run)[-1].rollouts
    with capsys.disabled():
        print(f"\nnode of engine 1 went down: {times}")
    assert {counters[name] for name in ("dropped_engine", "dropped_environment", "dropped_group")} == {0}
    why = vllm_lab.hpcrl("why", run.name, "--events").stdout
    assert f"the segment {address}:" in why
    assert "of engine 1 left the KV pool with its blocks (segments left: 1)" in why
    assert "engine 1 was lost" in why
    assert vllm_lab.json("status", run.name)["attempt"] == 1
    vllm_lab.hpcrl("cancel", run.name, "--yes")
    vllm_lab.wait_empty()
