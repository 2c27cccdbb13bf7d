"""The network of the nodes of a check's job: an all-reduce and an all-to-all over all, then bisection where that fails.

The batch process starts a step for each group of nodes (`check_network`), with one task a node, which starts a rank for
each GPU, or one without GPUs (``python -m hpcrl.sites.network_check DIRECTORY GROUP``). Ranks run in the interpreter of
the trainer, with the network's variables of a run. The first node chooses the port and tells the others by a file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.network.interfaces import interface_addresses
from hpcrl.network.ports import choose_ports
from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.processes.interpreter import module_command
from hpcrl.sites.bisection import Faults, find_faults
from hpcrl.sites.foreign_script import run_script
from hpcrl.sites.network_group import GroupResult, NodeCollectives, RankAnswer, judge_group, rank_answer
from hpcrl.storage.files import atomic_write, write_json
from hpcrl.storage.msgspec_types import prepared

SCRIPT = Path(__file__).with_name("network_script.py")
NETWORK = "network.json"
_POLL_S = 0.05
_PORT_S = 60.0
"""Longest wait for the port of the first node: its task may be started later."""
_LATE_S = 30.0
"""Timeout in seconds until the answer of a node is visible after its step has ended."""
_MOST_GROUPS = 40


class NetworkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the trial of the network.

    Attributes
    ----------
    python:
        Interpreter with torch.
    backend:
        ``nccl`` or ``gloo``.
    ranks_per_node:
        Processes of each node: its GPUs, or one.
    elements, loops:
        32-bit elements of each collective of a rank, and the number of timed repetitions.
    limit_s:
        Maximum seconds of a try of a group, from the start of a rank's process.
    first_port, last_port:
        The profile's range.
    least_gb_s:
        Minimum rate: below it the network of a node is slow; None: not known.
    environ:
        Variables of ranks; ``{node_interface}`` and ``{node_host}`` are filled on each node.
    step_options:
        Options of ``srun`` that ask for GPUs.
    """

    python: str
    backend: str = "gloo"
    ranks_per_node: int = 1
    elements: int = 1 << 20
    loops: int = 5
    limit_s: float = 120.0
    first_port: int
    last_port: int
    least_gb_s: float | None = None
    environ: dict[str, str] = {}
    step_options: list[str] = []


class NetworkReport(msgspec.Struct, frozen=True, kw_only=True):
    """Findings about the network.

    Attributes
    ----------
    backend:
        Backend of the trial; empty where it was skipped.
    skipped:
        Reason why it was skipped; empty where it was not.
    left_out:
        Nodes that took no part, because their GPUs do not compute.
    tries:
        All groups that were tried; the first one is of all nodes.
    nodes, pairs, groups, open:
        Causes of failures (`hpcrl.sites.bisection.Faults`).
    """

    backend: str = ""
    skipped: str = ""
    left_out: list[str] = []
    tries: list[GroupResult] = []
    nodes: list[str] = []
    pairs: list[tuple[str, str]] = []
    groups: list[list[str]] = []
    open: list[str] = []


class _GroupTask(msgspec.Struct, frozen=True):
    """Input file of the tasks of one group."""

    plan: NetworkPlan
    nodes: list[str]
    addresses: dict[str, str]


RunGroup = Callable[[tuple[str, ...], int], GroupResult]
"""Tries a group; the number of the try tells its files apart."""


def check_network(
    nodes: Sequence[str], plan: NetworkPlan, run_group: RunGroup, *, time_left: Callable[[], float]
) -> NetworkReport:
    """Try all nodes together, and where that fails find out which are to blame.

    Parameters
    ----------
    time_left:
        Seconds that may be used from now on; no group is begun with less than its limit.
    """
    tries: list[GroupResult] = []

    def works(group: tuple[str, ...]) -> bool:
        tries.append(run_group(group, len(tries)))
        return tries[-1].works

    def may_go_on() -> bool:
        return time_left() > plan.limit_s

    faults: Faults = find_faults(nodes, works, most=_MOST_GROUPS, may_go_on=may_go_on)
    return NetworkReport(
        backend=plan.backend,
        skipped="" if tries else "no time was left to test it",
        tries=tries,
        nodes=list(faults.nodes),
        pairs=list(faults.pairs),
        groups=[list(group) for group in faults.groups],
        open=list(faults.open) if tries else [],
    )


def run_group_by_srun(
    directory: Path, plan: NetworkPlan, addresses: Mapping[str, str], *, env: Mapping[str, str]
) -> RunGroup:
    """Return how a group is tried in the job that this process is the batch process of."""

    def run(nodes: tuple[str, ...], number: int) -> GroupResult:
        name = start_group(directory, plan, nodes, addresses, number)
        command = [
            *("srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--export=ALL"),
            *(f"--nodelist={','.join(nodes)}", "--overlap", "--cpu-bind=none", "--mpi=none", "--wait=0"),
            *plan.step_options,
            *module_command(sys.executable, "hpcrl.sites.network_check", str(directory), name),
        ]
        problem = ""
        try:
            done = subprocess.run(
                command, check=False, env=dict(env), stdin=subprocess.DEVNULL, timeout=plan.limit_s + 2 * _PORT_S
            )
            if done.returncode:
                problem = f"its step ended with exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            problem = "its step did not end in time"
        except OSError as error:
            problem = str(error)
        return group_result(directory, plan, nodes, name, late_s=_LATE_S if not problem else 1.0)

    return run


def start_group(
    directory: Path, plan: NetworkPlan, nodes: Sequence[str], addresses: Mapping[str, str], number: int
) -> str:
    """Write what the tasks of a group read; returns the group's name."""
    name = f"group-{number:03d}"
    write_json(directory / f"{name}.json", _GroupTask(plan, list(nodes), {node: addresses[node] for node in nodes}))
    return name


def group_result(directory: Path, plan: NetworkPlan, nodes: Sequence[str], name: str, *, late_s: float) -> GroupResult:
    """Read the answers of a group, of which the last may be seen ``late_s`` seconds late."""
    deadline = time.monotonic() + late_s
    wanted = {f"{name}-{node}.json": node for node in nodes}
    while True:
        # listed, not opened by name: NFS shows names late
        there = [file for file in wanted if file in os.listdir(directory)]
        if len(there) == len(wanted) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    answers = {}
    for file in there:
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            answers[wanted[file]] = msgspec.json.decode((directory / file).read_bytes(), type=prepared(NodeCollectives))
    return judge_group(nodes, answers, ranks_per_node=plan.ranks_per_node, least_gb_s=plan.least_gb_s)


def join_group(directory: Path, name: str, node: str, *, script: Path = SCRIPT) -> None:
    """Start the ranks of this node, wait for them, and write their answers."""
    task = msgspec.json.decode((directory / f"{name}.json").read_bytes(), type=prepared(_GroupTask))
    try:
        answer = NodeCollectives(node=node, ranks=_ranks(directory, name, node, task, script))
    except (HpcrlError, OSError) as error:
        answer = NodeCollectives(node=node, problem=str(error).split("\n", 1)[0])
    write_json(directory / f"{name}-{node}.json", answer)


def _ranks(directory: Path, name: str, node: str, task: _GroupTask, script: Path) -> list[RankAnswer]:
    plan, index = task.plan, task.nodes.index(node)
    port = _port(directory, name, task, chooses=index == 0)
    question = {
        "backend": plan.backend,
        "world": len(task.nodes) * plan.ranks_per_node,
        "elements": plan.elements,
        "loops": plan.loops,
        "address": task.addresses[task.nodes[0]],
        "port": port,
        # torch's timeout comes first, and names the collective; then Python prints its stack; then it is killed
        "timeout_s": max(1.0, plan.limit_s * 0.7),
        "hang_s": max(1.0, plan.limit_s * 0.9),
    }
    environ = _filled(plan.environ, task.addresses[node])
    pool = DaemonExecutor(plan.ranks_per_node, "rank")
    futures = [
        pool.submit(
            run_script,
            plan.python,
            script,
            {**question, "rank": index * plan.ranks_per_node + local, "local_rank": local},
            limit_s=plan.limit_s,
            environ=environ,
        )
        for local in range(plan.ranks_per_node)
    ]
    try:
        return [rank_answer(future.result()) for future in futures]
    finally:
        pool.shutdown(wait=False)


def _port(directory: Path, name: str, task: _GroupTask, *, chooses: bool) -> int:
    """Choose the port of the rendezvous and tell the others, or learn it (HpcrlError where that takes too long)."""
    first = task.nodes[0]
    told = f"{name}-port"
    if chooses:
        plan = task.plan
        (port,) = choose_ports(1, first=plan.first_port, last=plan.last_port, host=task.addresses[first])
        atomic_write(directory / told, str(port).encode())
        return port
    deadline = time.monotonic() + _PORT_S
    while told not in os.listdir(directory):
        if time.monotonic() > deadline:
            raise HpcrlError(f"did not learn the port of {first} within {_PORT_S:.0f} s")
        time.sleep(_POLL_S)
    return int((directory / told).read_text())


def _filled(environ: Mapping[str, str], address: str) -> dict[str, str]:
    interface = next((name for name, its in interface_addresses().items() if address in its), "lo")
    return {
        name: value.replace("{node_interface}", interface).replace("{node_host}", address)
        for name, value in environ.items()
    }


if __name__ == "__main__":
    join_group(Path(sys.argv[1]), sys.argv[2], os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
