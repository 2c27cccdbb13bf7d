"""Payload ``probe``: a small program in place of a rank, which reports its placement and its environment.

Ranks of one node are started as the trainer's are, by one process of Slurm (`hpcrl.trainer.launcher`). Every rank
writes ``attempts/NNNN/probe/<role>-<replica>-<rank>.json``. The trainer's first rank waits until all ranks of the plan
have reported, checks that each is placed as planned, and ends the run; the others wait to be stopped. ``PROBE_HOLD_S``
in the profile's ``env`` keeps all of them running for this many seconds, to inspect the nodes.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcrl.errors import DeadlineError, HpcrlError
from hpcrl.runs.role import RoleContext, run_role
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared

if TYPE_CHECKING:
    # not at run time: this import would dominate the start of a rank, and only one rank needs it
    from hpcrl.config.plan import Plan

_TICK_S = 0.2
_HOLD = "PROBE_HOLD_S"
_TRAINER = "trainer"
_NETWORK_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "NVSHMEM_", "VLLM_")


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Environment of a rank, as the probe observes it.

    Attributes
    ----------
    time_s:
        Time of the report, by the clock of the node.
    host:
        Slurm's name of the node, or the machine's outside of Slurm.
    gpus:
        ``CUDA_VISIBLE_DEVICES`` as a list; empty where it is not set.
    node_gpus:
        The same GPUs as the node numbers them: Slurm may count those of a step from 0.
    cpus:
        CPUs that the process may run on.
    memlock_bytes:
        Limit of locked memory, which RDMA needs; -1 without a limit.
    open_files:
        Limit of open files.
    shm_free_bytes:
        Free space in ``/dev/shm``.
    free_port:
        A port that could be opened.
    has_scontrol:
        Whether ``scontrol`` is installed and answers.
    environment:
        Variables of the network libraries.
    """

    time_s: float
    role: str
    replica: int
    rank: int
    node_rank: int
    host: str
    job_id: str
    gpus: tuple[str, ...]
    node_gpus: tuple[str, ...]
    cpus: int
    memlock_bytes: int
    open_files: int
    shm_free_bytes: int
    free_port: int
    has_scontrol: bool
    environment: dict[str, str]


def report(context: RoleContext) -> ProbeReport:
    """Return a report about this process and its node."""
    env = os.environ
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return ProbeReport(
        time_s=time.time(),
        role=context.role,
        replica=context.replica,
        rank=context.rank,
        node_rank=int(env.get("SLURM_NODEID", "0")),
        host=env.get("SLURMD_NODENAME") or socket.gethostname(),
        job_id=env.get("SLURM_JOB_ID", ""),
        gpus=_listed("CUDA_VISIBLE_DEVICES"),
        node_gpus=_listed("SLURM_STEP_GPUS") or _listed("CUDA_VISIBLE_DEVICES"),
        cpus=len(os.sched_getaffinity(0)),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shm_free_bytes=shutil.disk_usage("/dev/shm").free,
        free_port=port,
        has_scontrol=_answers("scontrol", "version"),
        environment={name: value for name, value in env.items() if name.startswith(_NETWORK_PREFIXES)},
    )


def _listed(variable: str) -> tuple[str, ...]:
    return tuple(part for part in os.environ.get(variable, "").split(",") if part)


def collect(directory: Path, count: int, *, timeout_s: float) -> tuple[list[ProbeReport], float]:
    """Wait for all reports; return them and the largest lag in seconds between writing and seeing one.

    Raises
    ------
    DeadlineError
        Some did not come; says how many.
    """
    deadline = time.monotonic() + timeout_s
    seen: dict[str, ProbeReport] = {}
    lag_s = 0.0
    while len(seen) < count:
        # the directory is listed, because NFS would cache that a name looked up too early does not exist
        for path in sorted(directory.iterdir()):
            if path.suffix == ".json" and not path.name.startswith(".") and path.name not in seen:
                found = msgspec.json.decode(path.read_bytes(), type=prepared(ProbeReport))
                seen[path.name] = found
                lag_s = max(lag_s, time.time() - found.time_s)
        if time.monotonic() > deadline:
            raise DeadlineError(f"{len(seen)} of {count} ranks reported within {timeout_s:g} s")
        time.sleep(_TICK_S)
    return list(seen.values()), lag_s


def misplaced(plan: Plan, reports: list[ProbeReport]) -> list[str]:
    """Return the differences between the reports and the plan, one sentence each."""
    wrong = []
    owners: dict[str, set[str]] = {}
    for group in plan.groups:
        for replica in range(group.replicas):
            label = f"{group.role.value} {replica}"
            mine = [r for r in reports if (r.role, r.replica) == (group.role.value, replica)]
            ranks = sorted(r.rank for r in mine)
            if ranks != list(range(group.ranks)):
                wrong.append(f"{label} has ranks {ranks}, the plan {group.ranks}")
            hosts = {r.node_rank: r.host for r in mine}
            if len(set(hosts.values())) != group.nodes:
                wrong.append(f"{label} is on {len(set(hosts.values()))} nodes, the plan says {group.nodes}")
            if group.beside or plan.layout.kind == "local":
                continue
            if group.share is None:
                wanted = plan.component(group).gpus_per_node if plan.component(group).gres != "none" else 0
                owned = [f"{host} is" for host in set(hosts.values())]
            else:
                wanted = group.share.gpus
                # the same GPUs are of both roles
                gpus = () if group.share.same else ((gpu, r.host) for r in mine for gpu in r.node_gpus)
                owned = list({f"GPU {gpu} of {host} is" for gpu, host in gpus})
            for what in owned:
                owners.setdefault(what, set()).add(label)
            wrong += [
                f"{label} rank {r.rank} on {r.host} sees {len(r.gpus)} GPUs, the plan says {wanted}"
                for r in mine
                if (wanted or group.share is not None) and len(r.gpus) != wanted
            ]
    shared = sorted((what, sorted(names)) for what, names in owners.items() if len(names) > 1)
    wrong += [f"{what} shared by {', '.join(names)}" for what, names in shared]
    return wrong


def main(context: RoleContext) -> None:
    """Write the report and act as a role: report ready, and wait until asked to stop."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    directory = context.run.attempt_dir(context.attempt) / "probe"
    directory.mkdir(exist_ok=True)
    mine = report(context)
    write_json(directory / f"{mine.role}-{mine.replica}-{mine.rank}.json", mine)
    if mine.rank == 0:
        context.ready()
    leads = mine.role == _TRAINER and mine.rank == 0
    if leads:
        _lead(context, directory)
        return
    # other trainer ranks end when the first has seen all reports; all other roles are stopped by the supervisor
    done = directory / "done"
    while not stopped and not (mine.role == _TRAINER and done.name in os.listdir(directory)):
        time.sleep(_TICK_S)


def _lead(context: RoleContext, directory: Path) -> None:
    plan = context.run.plan()
    count = plan.processes
    reports, lag_s = collect(directory, count, timeout_s=max(group.start_timeout_s for group in plan.groups))
    hosts = {r.host for r in reports}
    print(f"{count} ranks on {len(hosts)} nodes; a report was seen {lag_s:.1f} s after it was written, at most")
    hold_s = float(os.environ.get(_HOLD, "0"))
    if hold_s:
        print(f"all have reported; held for {hold_s:g} s ({_HOLD})", flush=True)
        time.sleep(hold_s)
    write_json(directory / "done", {"ranks": count, "nodes": len(hosts), "lag_s": lag_s})
    if wrong := misplaced(plan, reports):
        raise HpcrlError("\n".join(["not as planned:", *wrong]))


def _answers(*command: str) -> bool:
    try:
        result = subprocess.run(command, capture_output=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0


if __name__ == "__main__":
    run_role(main)
