"""What a supervisor of 500 ranks costs: its CPU time, and the requests that the Slurm controller gets of it.

The shape of the reference run with more engines, payload ``probe``, on a real Slurm of virtual nodes. The probe holds
all ranks for a while, which is the steady state that is measured.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from harness import ROOT, record, scratch

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.devcluster.settings import ClusterSettings
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus

HPCRL = Path(sys.executable).with_name("hpcrl")


def rpc_counts() -> dict[str, int]:
    """Requests by type since the controller started, from ``sdiag``."""
    text = subprocess.run(["sdiag"], check=True, capture_output=True, text=True).stdout
    by_type = text.partition("by message type")[2].partition("by user")[0]
    return {name: int(count) for name, count in re.findall(r"^\s+(\S+)\s.*?count:(\d+)", by_type, re.MULTILINE)}


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def wait_state(run: RunDir, state: RunState, timeout_s: float) -> RunStatus:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = RunStatus.read(run)
        if status is not None and (status.state is state or status.state.ended):
            if status.state is not state:
                raise RuntimeError(f"{run.name} is {status.state}: {status.cause}")
            return status
        time.sleep(0.5)
    raise RuntimeError(f"{run.name} is not {state} after {timeout_s:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=25, help="engine replicas of two nodes")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the steady state")
    arguments = parser.parse_args()
    nodes = 12 + 2 * arguments.engines
    root = scratch("supervisor")
    cluster = DevCluster.named("scale", Path(tempfile.mkdtemp(prefix="hpcrl-", dir="/tmp")))
    cluster.up(ClusterSettings(name="scale", nodes=nodes))
    try:
        os.environ |= {**cluster.environment(), "HPCRL_RUNS_ROOT": str(root)}
        profile = root / "devcluster.yaml"
        text = (ROOT / "clusters/devcluster.yaml").read_text().replace("nodes: 28", f"nodes: {nodes}")
        profile.write_text(
            text + f"\nlaunch: {{inherit: [PYTHONPATH]}}\nenv: {{PROBE_HOLD_S: '{3 * arguments.seconds:g}'}}\n"
        )
        settings = ["job.payload=probe", "job.layout=single", "trainer.nodes=12", "trainer.ranks=96"]
        settings += ["engine.backend=vllm", "engine.nodes=2", f"engine.replicas={arguments.engines}"]
        sets = [part for setting in settings for part in ("--set", setting)]
        before, started = rpc_counts(), time.monotonic()
        command = [str(HPCRL), "submit", "quickstart", "--cluster", str(profile), "--name", "big", *sets]
        subprocess.run(command, check=True, cwd=ROOT)
        run = RunDir(root / "big")
        status = wait_state(run, RunState.RUNNING, 600.0)
        start_s, starting = time.monotonic() - started, difference(rpc_counts(), before)
        supervisor = psutil.Process(status.supervisor.pid)
        family = [supervisor, *(p for p in supervisor.children() if p.name() == "srun")]
        cpu = [sum(p.cpu_times()[:2]) for p in family]
        before = rpc_counts()
        time.sleep(arguments.seconds)
        used = [sum(p.cpu_times()[:2]) - c for p, c in zip(family, cpu, strict=True)]
        steady = difference(rpc_counts(), before)
        memory = supervisor.memory_info().rss
        wait_state(run, RunState.COMPLETED, 300.0)
        reports = len(list(run.path.glob("attempts/0001/probe/*-*-*.json")))
    finally:
        cluster.down()
    figures = {
        "nodes": nodes,
        "ranks": reports,
        "steps": len(family) - 1,
        "start_s": round(start_s, 1),
        "start_rpcs": starting,
        "steady_s": arguments.seconds,
        "steady_rpcs": steady,
        "supervisor_cpu_share": round(used[0] / arguments.seconds, 4),
        "sruns_cpu_share": round(sum(used[1:]) / arguments.seconds, 4),
        "supervisor_rss_mib": memory >> 20,
    }
    for name, value in figures.items():
        print(f"{name:24} {value}")
    record("supervisor_scale", figures)


if __name__ == "__main__":
    main()
