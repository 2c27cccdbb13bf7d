"""The small job of ``hpcrl cluster check --job``: submitted, waited for, and turned into findings."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.cluster_slurm import NoContainer, PartitionConfig
from hpcrl.decoding import prepared
from hpcrl.errors import DeadlineError, HpcrlError
from hpcrl.fs import atomic_write, write_json
from hpcrl.installing import ROLE_IMPORTS, install_command
from hpcrl.interpreter import module_command
from hpcrl.sites.node_check import QUESTIONS, REPORT_PATTERN, NodeQuestions, NodeReport
from hpcrl.sites.profile_check import CheckFinding, Severity
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.render import render_script
from hpcrl.slurm.states import JobState

__all__ = ["check_nodes", "node_findings"]

_MINUTES = 10
_POLL_S = 1.0
_ENDED_S, _FAILED_S = 30.0, 5.0
"""How late the last report of a job that has ended may be seen; of one that has failed, most likely there is none."""
"""A job that has ended is given this long until its reports are seen here."""
_GIB = 1 << 30
_UNLIMITED = -1
_LEAST_SHM = 16 * _GIB
_LEAST_FILES = 65536
_FAR_CLOCK_S = 2.0
_SLOW_NAME_S = 1.0
_CLOSE_PORTS = 0.1


def check_nodes(
    cluster: SlurmCluster,
    partition: str,
    *,
    client: SlurmClient,
    directory: Path,
    nodes: int,
    wait_s: float,
    say: Callable[[str], None] = lambda text: None,
) -> list[NodeReport]:
    """Run the check on some nodes of a partition; returns what they told. Nothing of it is left.

    Parameters
    ----------
    directory:
        The runs root: the job's files are below it, because nodes must see them.
    nodes:
        How many to ask; two or more tell the lag of the filesystem.
    wait_s:
        Longest wait, queue included; then the job is cancelled.

    Raises
    ------
    DeadlineError
        The job has not ended in time.
    HpcrlError
        It failed before every node had answered; the message has its last words.
    """
    work = directory / f".hpcrl-check-{secrets.token_hex(4)}"
    work.mkdir(parents=True)
    try:
        site = cluster.partitions[partition]
        write_json(work / QUESTIONS, _questions(cluster, site, nodes))
        script = work / "check.sbatch"
        atomic_write(script, _render(cluster, partition, site, nodes, work).encode())
        job_id = client.submit(script, name="hpcrl-check", token=work.name).job_id
        say(f"job {job_id} asks {nodes} nodes of {partition}")
        try:
            failed = _wait(client, job_id, wait_s) is not JobState.COMPLETED
        finally:
            client.cancel(job_id)
        reports = _read(work, nodes, job_id, late_s=_FAILED_S if failed else _ENDED_S)
        if nodes > 1 and not any(report.address_problem or report.unreached for report in reports):
            on = site.node.interface or "the addresses that Slurm has"
            places = ", ".join(f"{report.host} {report.address}" for report in reports)
            say(f"each node reaches each other one on {on}: {places}")
        return reports
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _questions(cluster: SlurmCluster, site: PartitionConfig, nodes: int) -> NodeQuestions:
    return NodeQuestions(
        nodes=nodes,
        first_port=cluster.ports.first,
        last_port=cluster.ports.last,
        interface=site.node.interface,
        nics=tuple(nic.name for nic in site.node.nics),
        scratch=cluster.paths.scratch,
        cache=cluster.paths.cache,
        imports=role_imports(cluster),
    )


def _pythons(cluster: SlurmCluster) -> dict[str, str]:
    """Return the interpreters that a profile names, by role, absolute; ``vllm`` is for engines of that backend."""
    named = {str(role): python for role, python in cluster.python_by_role.items()}
    if cluster.vllm_python is not None:
        named["vllm"] = cluster.vllm_python
    return {role: os.path.abspath(os.path.expanduser(os.path.expandvars(python))) for role, python in named.items()}


def role_imports(cluster: SlurmCluster) -> dict[str, tuple[str, ...]]:
    """Return what roles import on nodes, by the interpreter that the profile gives them; nothing in containers.

    Roles that it gives none have that of the command line.
    """
    if not isinstance(cluster.container, NoContainer):
        return {}
    by_role = _pythons(cluster)
    wanted: dict[str, dict[str, None]] = {}
    for role in ("trainer", "orchestrator", "engine"):
        if role == "engine" and role not in by_role and "vllm" in by_role:
            continue
        modules = wanted.setdefault(by_role.get(role, sys.executable), {})
        modules |= dict.fromkeys(("hpcrl", *ROLE_IMPORTS[role]))
    # an environment of engines alone is vLLM's
    others = {by_role.get(role, sys.executable) for role in ("trainer", "orchestrator")}
    if (engine := by_role.get("engine")) is not None and engine not in others:
        wanted[engine] = dict.fromkeys(("hpcrl", "torch"))
    if "vllm" in by_role:
        wanted[by_role["vllm"]] = dict.fromkeys(("hpcrl", *ROLE_IMPORTS["vllm"]))
    return {python: tuple(modules) for python, modules in wanted.items()}


def _render(cluster: SlurmCluster, partition: str, site: PartitionConfig, nodes: int, work: Path) -> str:
    options = [f"--output={work}/log", "--export=ALL", f"--partition={partition}", f"--time=0:{_MINUTES}:00"]
    options += [f"--nodes={nodes}", "--ntasks-per-node=1", "--no-requeue"]
    for name in ("account", "qos", "reservation", "constraint"):
        if (value := getattr(site, name)) is not None:
            options.append(f"--{name}={value}")
    command = module_command(sys.executable, "hpcrl.sites.node_check", "batch", str(work))
    return render_script("check", cluster, options=[options], command=command, cluster=cluster.name)


def _wait(client: SlurmClient, job_id: int, wait_s: float) -> JobState:
    """How the job has ended."""
    deadline = time.monotonic() + wait_s
    last = "UNKNOWN"
    while time.monotonic() < deadline:
        job = client.jobs([job_id]).get(job_id)
        if job is not None:
            if job.state.ended:
                return job.state
            last = job.state.value + (f" ({job.reason})" if job.reason else "")
        time.sleep(_POLL_S)
    raise DeadlineError(
        f"the check's job {job_id} has not ended within {wait_s:g} s; last seen: {last}; it was cancelled\n"
        "    hint: --wait with more seconds, when nodes are free"
    )


def _read(work: Path, nodes: int, job_id: int, *, late_s: float) -> list[NodeReport]:
    deadline = time.monotonic() + late_s
    while True:
        # listed, not asked for by name: the lag of names is what this is about
        found = sorted(path for path in work.iterdir() if path.match(REPORT_PATTERN))
        if len(found) == nodes:
            return [msgspec.json.decode(path.read_bytes(), type=prepared(NodeReport)) for path in found]
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    log = work / "log"
    words = log.read_text(errors="replace").strip().splitlines()[-5:] if log.is_file() else ["it wrote no log"]
    raise HpcrlError(
        f"{len(found)} of {nodes} nodes answered the check's job {job_id}; its last words:\n"
        + "\n".join(f"    {line}" for line in words)
        + "\n    hint: nodes must see the runs root and this Python under the same paths"
    )


def node_findings(cluster: SlurmCluster, partition: str, reports: list[NodeReport]) -> list[CheckFinding]:
    """What of the reports differs from what a run needs; errors first.

    Parameters
    ----------
    partition:
        Key of the profile's partition whose nodes they are.
    reports:
        One of each node. A finding that several nodes have is given once, with the first one's name.
    """
    found: list[CheckFinding] = []
    for report in reports:
        found += _of_node(cluster, partition, report)
    for report in reports[:1]:
        found += _of_names(report, several=len(reports) > 1)
        found += _of_step(report)
    order = list(Severity)
    merged: dict[tuple[str, str], CheckFinding] = {}
    for finding in found:  # the same on many nodes is one finding
        merged.setdefault((finding.code, finding.what.partition(": ")[2]), finding)
    return sorted(merged.values(), key=lambda finding: order.index(finding.severity))


def _of_node(cluster: SlurmCluster, partition: str, report: NodeReport) -> Iterator[CheckFinding]:
    key = f"partitions.{partition}.node"
    for code, severity, where, what, hint in (
        *_limits(cluster, partition, report),
        *_services(cluster, report),
        *_imports(cluster, report),
        *_hardware(cluster, partition, report),
    ):
        yield CheckFinding(code, severity, where or key, f"{report.host}: {what}", hint)


_Row = tuple[str, Severity, str, str, str]
"""Code, severity, key (empty: the node's shape), what, hint."""


def _limits(cluster: SlurmCluster, partition: str, report: NodeReport) -> Iterator[_Row]:
    node = cluster.partitions[partition].node
    if node.fabric.kind != "ethernet" and report.memlock_bytes != _UNLIMITED:
        what = f"tasks may lock {report.memlock_bytes / _GIB:.1f} GiB of memory; RDMA needs all of it"
        way = "set LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        yield "memlock", Severity.ERROR, "", what, way
    if 0 <= report.open_files < _LEAST_FILES:
        what = f"a task may open {report.open_files} files; a large run needs {_LEAST_FILES}"
        yield "open-files", Severity.WARNING, "", what, "set LimitNOFILE for slurmd"
    if node.gpus and report.shm_bytes < _LEAST_SHM:
        what = f"/dev/shm has {report.shm_bytes / _GIB:.1f} GiB; NCCL and vLLM want {_LEAST_SHM // _GIB} and more"
        yield "small-shm", Severity.WARNING, "", what, "mount a larger tmpfs on /dev/shm"


def _services(cluster: SlurmCluster, report: NodeReport) -> Iterator[_Row]:
    if cluster.capabilities.scontrol_on_nodes and not report.has_scontrol:
        what = "scontrol does not answer there, so a run cannot requeue itself"
        way = "set scontrol_on_nodes: false, or add its directory to launch.path"
        yield "no-scontrol", Severity.ERROR, "capabilities.scontrol_on_nodes", what, way
    if len(report.busy_ports) > _CLOSE_PORTS * report.looked_at_ports:
        what = f"{len(report.busy_ports)} of {report.looked_at_ports} ports looked at are taken"
        yield "ports-taken", Severity.WARNING, "ports", what, "choose another range"
    if 0 < report.ephemeral_first <= cluster.ports.last:
        what = f"the kernel gives ports from {report.ephemeral_first} on to connections"
        yield "ports-ephemeral", Severity.WARNING, "ports.last", what, "choose a range below"
    for name, problem in (("scratch", report.scratch_problem), ("cache", report.cache_problem)):
        if problem:
            yield f"no-{name}", Severity.ERROR, f"paths.{name}", problem, "correct the path, or its rights"
    if abs(report.clock_ahead_s) > _FAR_CLOCK_S:
        what = f"its clock differs from the filesystem's by {report.clock_ahead_s:+.1f} s"
        yield "clock", Severity.WARNING, "paths.runs_root", what, "run chrony or ntpd; merged logs would mislead"


def _imports(cluster: SlurmCluster, report: NodeReport) -> Iterator[_Row]:
    by_role = _pythons(cluster)
    for python, problem in report.failed_imports.items():
        roles = [role for role in ("trainer", "orchestrator", "engine") if by_role.get(role, sys.executable) == python]
        vllm = python == by_role.get("vllm")
        key = "vllm_python" if vllm else f"python_by_role.{roles[0]}" if roles else "python_by_role"
        whose = "vLLM engines" if vllm else " and ".join(roles) or "engines"
        what = f"{python} cannot import what {whose} need: {problem}"
        way = f"{install_command('vllm' if vllm else 'all', python=python)}, or name another interpreter in {key}"
        yield "imports", Severity.ERROR, key, what, way


def _hardware(cluster: SlurmCluster, partition: str, report: NodeReport) -> Iterator[_Row]:
    node = cluster.partitions[partition].node
    if not report.has_interface:
        what = f"there is no network interface {node.interface}"
        yield "no-interface", Severity.ERROR, "", what, "`ip -br address` on a node lists them"
    elif report.address_problem:
        way = "set `interface` to the one that nodes reach each other on (`ip -br address` on a node lists them)"
        yield "no-address", Severity.ERROR, f"partitions.{partition}.node.interface", report.address_problem, way
    for other, why in sorted(report.unreached.items()):
        what = f"it does not reach {other}: {why}"
        way = "let nodes connect to each other on the profile's ports, or name another interface"
        yield "unreachable", Severity.ERROR, f"partitions.{partition}.node.interface", what, way
    if report.missing_nics:
        what = f"there is no adapter {', '.join(report.missing_nics)}"
        yield "no-nic", Severity.ERROR, "", what, "`ibv_devices` on a node lists them"
    if node.gpus and report.gpus is None:
        what = "there is no NVIDIA driver, but the profile says that the node has GPUs"
        yield "no-driver", Severity.WARNING, "", what, "drain the node, or set gpus: 0"
    elif report.gpus is not None and report.gpus < node.gpus:
        what = f"the driver shows {report.gpus} GPUs, the profile says {node.gpus}"
        yield "gpus-missing", Severity.ERROR, "", what, "drain the node, or correct gpus"
    if not (report.c_compiler if node.gpus else report.cxx_compiler):
        language, users = ("C", "Triton, on GPUs") if node.gpus else ("C++", "torch, on processors")
        what = f"there is no {language} compiler, which {users}, needs for recipes with trainer.memory.compile"
        way = f"install {'gcc' if node.gpus else 'g++'}, or add its directory to launch.path, where recipes ask for it"
        yield "no-compiler", Severity.NOTE, "", what, way


def _of_step(report: NodeReport) -> Iterator[CheckFinding]:
    key, printed = "launch", "; ".join(report.step.printed)
    if report.step.problem:
        what = f"a small role in a step of its own was not seen to begin and end: {report.step.problem}"
        what += f"; what was printed there: {printed}" if printed else ""
        way = "`srun --overlap hostname` in a job shows what starts; look at TaskProlog and at wrappers of srun"
        yield CheckFinding("step-silent", Severity.ERROR, key, what, way)
    elif printed:
        what = f"something prints into the output of each step: {printed}"
        way = "nothing to do for hpcrl, which passes it over; TaskProlog or a wrapper of srun prints it"
        yield CheckFinding("step-noise", Severity.NOTE, key, what, way)


def _of_names(report: NodeReport, *, several: bool) -> Iterator[CheckFinding]:
    if not several:
        return
    if report.visible_s is None:
        what = "a file that another node had written was not seen within two minutes"
        way = "all nodes must mount the same filesystem there"
        yield CheckFinding("not-shared", Severity.ERROR, "paths.runs_root", f"{report.host}: {what}", way)
    elif report.negative_lag_s is None or report.negative_lag_s > _SLOW_NAME_S:
        lag = "two minutes and more" if report.negative_lag_s is None else f"{report.negative_lag_s:.0f} s"
        what = f"a name that had been looked for was missing for {lag} after it was in the listing"
        way = "nothing to do for hpcrl, which lists; other tools may want lookupcache=positive in the NFS mount"
        yield CheckFinding("name-lag", Severity.NOTE, "paths.runs_root", f"{report.host}: {what}", way)
