"""Runs on a real Slurm of virtual nodes: every layout, the shape of the reference run, inside of an allocation."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from patience import patience, wait_for
from slurm_lab import SlurmLab, events, job_id, wait_step

from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

ENDS = ["COMPLETED", "FAILED", "LOST", "CANCELLED"]
#: of a constant learning rate; the reward of held-out prompts is then several times what it was
STEPS = 10
LENGTH = (f"trainer.steps={STEPS}", "trainer.optimizer.schedule=constant", "evaluation.every_steps=0")
FOUR_NODES = ("trainer.nodes=2", "trainer.ranks=2", "engine.replicas=2")


@pytest.mark.parametrize("layout", ["hetjob", "elastic"])
def test_quickstart_learns_on_four_nodes(layout: str, slurm_lab: SlurmLab, taught_model: Path) -> None:
    own, apart = [f"job.layout={layout}"], layout == "hetjob"
    if apart:  # the orchestrator has a node of its own, in another partition, and asks for no GPUs there
        profile = yaml.safe_load(slurm_lab.profile.read_text())
        node = profile["partitions"]["gpu"]["node"]
        profile["partitions"]["urgent"] = {"nodes": 28, "node": {**node, "gpus": 0}}
        slurm_lab.profile.write_text(yaml.safe_dump(profile))
        own.append("job.partition={orchestrator: urgent}")
    run = slurm_lab.submit(
        f"q-{layout}", f"model.path={taught_model}", *LENGTH, *FOUR_NODES, *own, recipe="quickstart", small=False
    )
    slurm_lab.wait_state(run, ["RUNNING", *ENDS])
    listeners = slurm_lab.listeners(run)
    status = _has_learned(slurm_lab, run)
    _listens_on_its_nodes_alone(listeners, status, slurm_lab)
    jobs = {c["job"]["job_id"] for c in status["components"] if c["job"]}
    assert len({job_id(run), *jobs}) == (3 if layout == "elastic" else 1)
    _has_four_nodes(status, apart=apart)
    slurm_lab.wait_empty()
    _frees_its_nodes(slurm_lab, run, job_id(run))


def _has_learned(lab: SlurmLab, run: RunDir) -> Any:
    """Wait for the end of a run that learns; returns its status."""
    status = lab.wait_state(run, ENDS, timeout_s=300)
    assert status["state"] == "COMPLETED", lab.hpcrl("why", run.name).stdout
    assert [record.step for record in read_metrics(run)] == list(range(1, STEPS + 1))
    rewards = [event.data["reward"] for event in events(run, "evaluation")]
    print(f"{run.name}: reward of held-out prompts {rewards}")
    assert rewards[-1] >= rewards[0] + 0.1
    return status


def _has_four_nodes(status: Any, *, apart: bool) -> None:
    """Trainer and engines have nodes of their own; ``apart``: the orchestrator, too."""
    nodes = {(c["role"], c["replica"]): c["nodes"] for c in status["components"]}
    assert len(nodes["trainer", 0]) == 2
    assert len(nodes["orchestrator", 0]) == 1
    assert (nodes["orchestrator", 0] == nodes["trainer", 0][:1]) is not apart
    others = {*nodes["trainer", 0], *nodes["engine", 0], *nodes["engine", 1]}
    assert (nodes["orchestrator", 0][0] not in others) is apart
    assert len({*nodes["trainer", 0], *nodes["engine", 0], *nodes["engine", 1]}) == 4


def _frees_its_nodes(lab: SlurmLab, run: RunDir, job: int) -> None:
    """A clean end of the trainer frees all nodes: nobody keeps engines waiting for work that never comes."""
    trainer = [e for e in events(run, "component.state") if (e.data["role"], e.data["state"]) == ("trainer", "EXITED")]
    freed_s = max(int(record["EndTime"]) for record in lab.client().details(job)) - trainer[-1].time_s
    print(f"{run.name}: nodes were free {freed_s:.0f} s after the trainer's end")
    assert freed_s < 30.0 * patience()


def _listens_on_its_nodes_alone(listeners: list[tuple[str, str, int]], status: Any, lab: SlurmLab) -> None:
    """Servers listen on the addresses of their nodes; of the run, only torch's store takes no address (docs/admins.md).

    What srun itself listens on is Slurm's: its ports are in nobody's profile, and its credentials guard them.
    """
    nodes = {node.name: node.address for node in lab.cluster.record().nodes}
    print("listening:", *listeners, sep="\n    ")
    (trainer,) = (c for c in status["components"] if c["role"] == "trainer")
    anywhere = {(role, port) for role, ip, port in listeners if ip in ("0.0.0.0", "::") and role != "srun"}
    assert anywhere == {("trainer", trainer["port"])}
    for component in status["components"]:
        role, port = component["role"], component["port"]
        address = nodes[component["nodes"][0]]
        assert component["host"] == address
        assert role == "trainer" or (role, address, port) in listeners, (role, address, port)


def test_reference_run_has_its_shape_on_28_nodes(slurm_lab: SlurmLab) -> None:
    run = slurm_lab.submit("glm", "job.payload=probe", recipe="glm5_swe", small=False)
    status = slurm_lab.wait_state(run, ENDS, timeout_s=400)
    # the probe itself fails where a rank or a GPU is not where the plan says
    assert status["state"] == "COMPLETED", slurm_lab.hpcrl("why", run.name).stdout
    directory = run.attempt_dir(1) / "probe"
    assert json.loads((directory / "done").read_bytes())["nodes"] == 28
    reports = [json.loads(path.read_bytes()) for path in directory.glob("*.json")]
    gpus = {(r["host"], gpu) for r in reports for gpu in r["gpus"] if r["role"] != "orchestrator"}
    assert (len(reports), len(gpus)) == (226, 224)


def test_a_run_learns_inside_of_an_allocation(slurm_lab: SlurmLab, taught_model: Path) -> None:
    """Nothing is submitted, and the job is the shell's: it is there after the run as it was before. One job of four
    nodes, which is what the layout ``single`` is."""
    settings = (f"model.path={taught_model}", *LENGTH, *FOUR_NODES, "job.layout=single")
    words = [word for setting in settings for word in ("--set", setting)]
    submit = ["submit", "quickstart", "--cluster", str(slurm_lab.profile), "--in-job", *words]
    refused = slurm_lab.salloc(2, *submit, "--name", "narrow")
    assert refused.returncode == 2
    assert "has 2 nodes, the run needs 4\n    hint: salloc --partition=gpu --nodes=4" in refused.stderr
    assert not (slurm_lab.runs_root / "narrow").exists()
    run = RunDir(slurm_lab.runs_root / "inside")
    with ThreadPoolExecutor() as beside:
        following = beside.submit(slurm_lab.salloc, 5, *submit, "--name", "inside", "--follow")
        wait_for(lambda: following.done() or RunStatus.read(run), 120.0, "a supervisor")
        slurm_lab.wait_state(run, ["RUNNING", *ENDS])
        listeners = slurm_lab.listeners(run)
        done = following.result()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{slurm_lab.hpcrl('why', run.name).stdout}"
    status = _has_learned(slurm_lab, run)
    _listens_on_its_nodes_alone(listeners, status, slurm_lab)
    _has_four_nodes(status, apart=False)
    (submission,) = RunRecord.read(run).submissions
    job = slurm_lab.client().jobs([int(submission.in_job)])[int(submission.in_job)]
    assert f"inside of job {job.job_id}" in done.stderr
    assert job.leader.comment == "", "a job of the shell, not of the run"
    used = {node for component in status["components"] for node in component["nodes"]}
    assert (len(job.nodes), used) == (5, set(job.nodes[:4]))
    slurm_lab.wait_empty()
    _frees_its_nodes(slurm_lab, run, job.job_id)


@pytest.mark.campaign
def test_trainer_and_engines_share_a_node(slurm_lab: SlurmLab, taught_model: Path) -> None:
    """Each has GPUs of its own; the run learns, and an engine that is killed comes back into its part of the node."""
    probe = slurm_lab.submit("parts", "job.payload=probe", recipe="qwen3_30b_a3b_node", small=False)
    status = slurm_lab.wait_state(probe, ENDS)
    assert status["state"] == "COMPLETED", slurm_lab.hpcrl("why", probe.name).stdout
    reports = [json.loads(path.read_bytes()) for path in (probe.attempt_dir(1) / "probe").glob("*-*.json")]
    assert len({report["host"] for report in reports}) == 1
    seen = {r["role"]: tuple(r["node_gpus"]) for r in reports}
    assert (len(seen["trainer"]), len(seen["engine"]), seen["orchestrator"]) == (4, 4, ())
    assert sorted(seen["trainer"] + seen["engine"]) == list("01234567")

    shape = ("trainer.ranks=2", "engine.replicas=2", "engine.placement=shared_node")
    run = slurm_lab.submit("one", f"model.path={taught_model}", *LENGTH, *shape, recipe="quickstart", small=False)
    wait_step(run, 2)
    (engine,) = (c for c in RunStatus.read(run).components if (c.role, c.replica) == ("engine", 1))
    os.kill(engine.pid, signal.SIGKILL)
    status = _has_learned(slurm_lab, run)
    assert len({node for c in status["components"] for node in c["nodes"]}) == 1
    assert {(c["role"], c["replica"]): c["restarts"] for c in status["components"]}["engine", 1] == 1


@pytest.mark.campaign
def test_trainer_and_engine_have_the_same_gpus(slurm_lab: SlurmLab) -> None:
    """Steps of both run at the same time, and each sees the GPUs of its ranks."""
    probe = slurm_lab.submit(
        "same",
        "job.payload=probe",
        "engine.placement=shared_gpus",
        "engine.replicas=2",
        recipe="qwen3_30b_a3b_node",
        small=False,
    )
    status = slurm_lab.wait_state(probe, ENDS)
    assert status["state"] == "COMPLETED", slurm_lab.hpcrl("why", probe.name, "--events").stdout
    reports = [json.loads(path.read_bytes()) for path in (probe.attempt_dir(1) / "probe").glob("*-*.json")]
    seen = {(r["role"], r["replica"]): "".join(r["gpus"]) for r in reports}
    assert (seen["trainer", 0], seen["engine", 0], seen["engine", 1]) == ("0123", "01", "23")
    assert len({report["host"] for report in reports}) == 1


@pytest.mark.campaign
def test_trainer_and_engine_take_turns_on_a_node(slurm_lab: SlurmLab) -> None:
    """As two steps of one job, of one node; that such a run learns is shown by `tests/e2e/test_colocated.py`."""
    few = ("rollouts.rollouts_per_step=8", "rollouts.group_size=4", "evaluation.every_steps=0", "evaluation.prompts=8")
    run = slurm_lab.submit(
        "turns",
        f"model.path={slurm_lab.model}",
        "trainer.steps=4",
        "trainer.ranks=2",
        # GPUs of this cluster are there by name alone
        "engine.device=cpu",
        *few,
        recipe="quickstart_colocated",
        small=False,
    )
    status = slurm_lab.wait_state(run, ENDS, timeout_s=300)
    assert status["state"] == "COMPLETED", slurm_lab.hpcrl("why", run.name, "--events").stdout
    places = {component["role"]: component["nodes"] for component in status["components"]}
    assert len({node for nodes in places.values() for node in nodes}) == 1
    assert places["engine"] == places["trainer"]
    job = slurm_lab.client().jobs([job_id(run)])[job_id(run)]
    assert len(job.nodes) == 1
    records = read_metrics(run)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert all(record.phases_s["swap"] > 0 for record in records)
    # the engine has what the trainer has: its steps share memory
    assert max(record.mismatch_kl for record in records) < 1e-5
    assert [event.data["version"] for event in events(run, "trainer.handed_over")] == [0, 1, 2, 3, 4]
    assert not list(run.weights_dir.rglob("*.safetensors"))
    slurm_lab.wait_empty()
