"""The payload ``probe``: what it collects and what it complains about."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Plan
from hpcrl.errors import DeadlineError
from hpcrl.jobplan import make_plan
from hpcrl.runs.probe import ProbeReport, collect, misplaced
from hpcrl.storage.files import write_json


def planned(name: str = "glm5_swe", *settings: str) -> Plan:
    recipe = load_recipe(name, ["job.payload=probe", *settings]).value
    return make_plan(recipe, load_cluster("h200-28").value, "r", Path("/r"))


def reports(plan: Plan) -> list[ProbeReport]:
    """One of every rank, each where the plan says."""
    first = {0: 0, 1: 12, 2: 20}
    found = []
    for group in plan.groups:
        for replica in range(group.replicas):
            begin = first[group.component] + group.first_node + replica * group.nodes
            gpus = () if group.beside else tuple("01234567")
            if group.share is not None:
                gpus = tuple(map(str, group.share.gpus_of(replica)))
            for rank in range(group.ranks):
                node = rank // group.ranks_per_node
                found.append(
                    ProbeReport(
                        time_s=0.0,
                        role=group.role.value,
                        replica=replica,
                        rank=rank,
                        node_rank=node,
                        host=f"n{begin + node}",
                        job_id="7",
                        gpus=gpus,
                        node_gpus=gpus,
                        cpus=192,
                        memlock_bytes=-1,
                        open_files=1 << 20,
                        shm_free_bytes=1 << 30,
                        free_port=1,
                        has_scontrol=True,
                        environment={},
                    )
                )
    return found


def test_all_where_they_should_be() -> None:
    plan = planned()
    assert len(reports(plan)) == 226
    assert misplaced(plan, reports(plan)) == []


def test_what_is_wrong_is_reported() -> None:
    plan, found = planned(), reports(planned())
    by_label = {(r.role, r.replica, r.rank): i for i, r in enumerate(found)}

    def change(role: str, replica: int, rank: int, **values: object) -> list[ProbeReport]:
        i = by_label[role, replica, rank]
        fields = {name: getattr(found[i], name) for name in ProbeReport.__struct_fields__}
        return [*found[:i], ProbeReport(**{**fields, **values}), *found[i + 1 :]]  # type: ignore[arg-type]

    assert misplaced(plan, change("decode", 0, 9, gpus=("0",))) == [
        "decode 0 rank 9 on n21 sees 1 GPUs, the plan says 8"
    ]
    shared = [r for r in found if (r.role, r.replica) != ("prefill", 1)]
    moved = [change("prefill", 1, rank, host=f"n{12 + rank // 8}")[by_label["prefill", 1, rank]] for rank in range(16)]
    assert misplaced(plan, shared + moved) == [f"n{n} is shared by prefill 0, prefill 1" for n in (12, 13)]
    assert misplaced(plan, found[:-1]) == [f"trainer 0 has ranks {list(range(95))}, the plan 96"]


def test_parts_of_a_shared_node_are_apart() -> None:
    plan = planned("qwen3_30b_a3b_node")
    found = reports(plan)
    assert misplaced(plan, found) == []
    # as where Slurm numbers the GPUs of each step from 0: what the node calls them counts
    hidden = [msgspec.structs.replace(r, gpus=r.gpus and tuple("0123")) for r in found]
    assert misplaced(plan, hidden) == []
    same = [msgspec.structs.replace(r, node_gpus=r.gpus and tuple("0123")) for r in found]
    assert misplaced(plan, same) == [f"GPU {i} of n0 is shared by engine 0, trainer 0" for i in range(4)]
    blind = [msgspec.structs.replace(r, gpus=()) if r.role == "engine" else r for r in found]
    assert misplaced(plan, blind) == [f"engine 0 rank {i} on n0 sees 0 GPUs, the plan says 4" for i in range(4)]


def test_the_same_gpus_are_of_both_roles() -> None:
    plan = planned("qwen3_30b_a3b_node", "engine.placement=shared_gpus")
    found = [
        msgspec.structs.replace(r, node_gpus=tuple("01234567")) if r.role in ("engine", "trainer") else r
        for r in reports(plan)
    ]
    assert misplaced(plan, found) == []
    blind = [msgspec.structs.replace(r, gpus=()) if r.role == "engine" else r for r in found]
    assert misplaced(plan, blind) == [f"engine 0 rank {i} on n0 sees 0 GPUs, the plan says 4" for i in range(4)]


def test_missing_reports_have_a_deadline(tmp_path: Path) -> None:
    write_json(tmp_path / "trainer-0-0.json", reports(planned())[0])
    with pytest.raises(DeadlineError, match="1 of 2 ranks reported"):
        collect(tmp_path, 2, timeout_s=0.0)


def test_a_rank_reports_and_stops_on_request(tmp_path: Path) -> None:
    (tmp_path / "attempts/0001/ready").mkdir(parents=True)
    (tmp_path / "attempts/0001/logs/engine").mkdir(parents=True)
    env = {"HPCRL_RUN_DIR": str(tmp_path), "HPCRL_ATTEMPT": "1", "HPCRL_ROLE": "engine", "HPCRL_REPLICA": "2"}
    env |= {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n7", "CUDA_VISIBLE_DEVICES": "0,1"}
    env |= {"NCCL_IB_HCA": "=mlx5_0:1", "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen([sys.executable, "-m", "hpcrl.runs.probe"], env=env)
    try:
        path = tmp_path / "attempts/0001/ready/engine-2.json"
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.terminate()
    assert process.wait(30) == 0
    report = json.loads((tmp_path / "attempts/0001/probe/engine-2-0.json").read_text())
    assert (report["host"], report["gpus"]) == ("n7", ["0", "1"])
    assert report["environment"] == {"NCCL_IB_HCA": "=mlx5_0:1"}
