"""The batch process of ``hpcrl cluster check --job``: one task a node, then the network between them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from hpcrl.processes.daemon_threads import run_process
from hpcrl.processes.interpreter import module_command
from hpcrl.sites.gpu_products import gpu_findings
from hpcrl.sites.network_check import NETWORK, NetworkPlan, NetworkReport, check_network, run_group_by_srun
from hpcrl.sites.node_reach import RunAddresses
from hpcrl.sites.node_report import NodeQuestions, NodeReport, read_questions, read_reports
from hpcrl.sites.profile_check import Severity
from hpcrl.sites.step_check import check_step
from hpcrl.slurm.launch_arguments import step_environment
from hpcrl.storage.files import write_json

_NODE_STEP_S = 720.0
"""Longest time of the tasks on nodes: names that become visible, imports, products."""
_ALL_S = 1020.0
"""From the start of the batch process until no further group of nodes is tried; the job's limit is 1200 s."""
_LATE_S = 60.0
"""Timeout in seconds until the last report of a node is visible here."""


def run_batch(directory: Path) -> int:
    """Start one task a node, wait for all, and then try the network between them; returns the exit code."""
    questions = read_questions(directory)
    begun = time.monotonic()
    command = [
        *("srun", f"--nodes={questions.nodes}", f"--ntasks={questions.nodes}", "--ntasks-per-node=1", "--export=ALL"),
        *("--overlap", "--cpu-bind=none", "--mpi=none", *questions.step_options),
        *module_command(sys.executable, "hpcrl.sites.node_check", str(directory)),
    ]
    env = step_environment(os.environ)
    step = run_process(check_step(directory, env))
    addresses = RunAddresses.ask(questions.interface)
    try:
        code = subprocess.run(
            command, check=False, env=env | addresses.to_env() | step.to_env(), timeout=_NODE_STEP_S
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"the step on the nodes did not end within {_NODE_STEP_S:.0f} s", file=sys.stderr)
        return 1
    if not code:
        reports = read_reports(directory, questions.nodes, late_s=_LATE_S)
        report = try_network(
            directory, questions, reports, addresses, env=env, time_left=lambda: begun + _ALL_S - time.monotonic()
        )
        write_json(directory / NETWORK, report)
    return code


def try_network(
    directory: Path,
    questions: NodeQuestions,
    reports: Sequence[NodeReport],
    addresses: RunAddresses,
    *,
    env: Mapping[str, str],
    time_left: Callable[[], float],
) -> NetworkReport:
    """Try the network between nodes that can take part; says why where it is not tried."""
    plan = questions.network
    if plan is None:
        return NetworkReport(skipped="no interpreter with torch is known, as in containers")
    if addresses.problem:
        return NetworkReport(skipped=addresses.problem)
    with_torch = [report for report in reports if _has_torch(report, plan.python)]
    if not with_torch:
        return NetworkReport(skipped=f"{plan.python} has no torch that loads")
    ready = with_torch
    if plan.backend == "nccl":
        ready = [report for report in with_torch if len(report.products) == questions.gpus and _all_right(report)]
        if not any(report.products for report in reports):
            # no node has a driver: CPU processes can still show whether the network carries them
            ready, plan = with_torch, _without_gpus(plan)
    left_out = [report.host for report in reports if report not in ready]
    nodes = [report.host for report in ready]
    if len(nodes) * plan.ranks_per_node < 2:
        why = "there is one node" if len(reports) == 1 else "fewer than two nodes can take part"
        return NetworkReport(skipped=why, left_out=left_out)
    run = run_group_by_srun(directory, plan, addresses.by_node, env=env)
    report = check_network(nodes, plan, run, time_left=time_left)
    return msgspec.structs.replace(report, left_out=left_out)


def _has_torch(report: NodeReport, python: str) -> bool:
    return any(
        answer.kind == "good" and answer.question.library == "torch" and answer.question.python == python
        for answer in report.libraries
    )


def _all_right(report: NodeReport) -> bool:
    return not any(row.severity is Severity.ERROR for row in gpu_findings(report.products, tflops=None))


def _without_gpus(plan: NetworkPlan) -> NetworkPlan:
    return msgspec.structs.replace(
        plan, backend="gloo", ranks_per_node=1, elements=1 << 20, loops=5, least_gb_s=None, step_options=[]
    )


if __name__ == "__main__":
    sys.exit(run_batch(Path(sys.argv[1])))
