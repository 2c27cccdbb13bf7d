"""Findings from the reports of nodes about a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.cluster_slurm import NoContainer, NodeConfig
from hpcrl.sites.fact_findings import fact_findings
from hpcrl.sites.gpu_products import gpu_findings
from hpcrl.sites.library_findings import FindingRow, library_findings
from hpcrl.sites.network_check import NetworkReport
from hpcrl.sites.network_findings import network_findings
from hpcrl.sites.node_report import NodeReport
from hpcrl.sites.profile_check import CheckFinding, Severity

_GIB = 1 << 30
_UNLIMITED = -1
_LEAST_SHM = 16 * _GIB
_LEAST_FILES = 65536
_FAR_CLOCK_S = 2.0
_SLOW_NAME_S = 1.0
_CLOSE_PORTS = 0.1
_NAMED = 4
"""Nodes with the same finding that are named; of the others there is a number."""


def node_findings(
    cluster: SlurmCluster, partition: str, reports: Sequence[NodeReport], network: NetworkReport | None = None
) -> list[CheckFinding]:
    """Return the findings where the reports differ from a run's requirements; errors first.

    Parameters
    ----------
    partition:
        Key of the profile's partition with these nodes.
    reports:
        One report of each node. A finding that several nodes have is given once, with their names.
    network:
        Findings about the network between them.
    """
    hosts: dict[FindingRow, list[str]] = {}
    for report in reports:
        for row in _of_node(cluster, partition, report):
            hosts.setdefault(row, []).append(report.host)
    key = f"partitions.{partition}.node"
    found = [
        CheckFinding(row.code, row.severity, row.key or key, f"{_names(its)}: {row.what}", row.hint)
        for row, its in hosts.items()
    ]
    if network is not None:
        found += network_findings(network, key)
    for report in reports[:1]:
        found += _of_names(report, several=len(reports) > 1)
        found += _of_step(report)
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _names(hosts: Sequence[str]) -> str:
    """Return the nodes that have the same finding."""
    if len(hosts) <= _NAMED:
        return ", ".join(hosts)
    return f"{', '.join(hosts[:_NAMED])} and {len(hosts) - _NAMED} others"


def _of_node(cluster: SlurmCluster, partition: str, report: NodeReport) -> Iterator[FindingRow]:
    node = cluster.partitions[partition].node
    yield from _limits(cluster, partition, report)
    yield from _services(cluster, report)
    yield from _hardware(cluster, partition, report)
    yield from library_findings(report.libraries, has_driver=report.gpus is not None)
    yield from gpu_findings(report.products, tflops=node.gpu.tflops.get("bfloat16"), pcie_gb_s=node.gpu.pcie_gb_s)
    yield from fact_findings(report.facts, node, cluster.filesystem)


def _limits(cluster: SlurmCluster, partition: str, report: NodeReport) -> Iterator[FindingRow]:
    node = cluster.partitions[partition].node
    if node.fabric.kind != "ethernet" and report.memlock_bytes != _UNLIMITED:
        what = f"tasks may lock {report.memlock_bytes / _GIB:.1f} GiB of memory; RDMA needs all of it"
        way = "set LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        yield FindingRow("memlock", Severity.ERROR, "", what, way)
    if 0 <= report.open_files < _LEAST_FILES:
        what = f"a task may open {report.open_files} files; a large run needs {_LEAST_FILES}"
        yield FindingRow("open-files", Severity.WARNING, "", what, "set LimitNOFILE for slurmd")
    if node.gpus and report.shm_bytes < _LEAST_SHM:
        what = f"/dev/shm has {report.shm_bytes / _GIB:.1f} GiB; NCCL and vLLM want {_LEAST_SHM // _GIB} and more"
        yield FindingRow("small-shm", Severity.WARNING, "", what, "mount a larger tmpfs on /dev/shm")


def _services(cluster: SlurmCluster, report: NodeReport) -> Iterator[FindingRow]:
    if cluster.capabilities.scontrol_on_nodes and not report.has_scontrol:
        what = "scontrol does not answer there, so a run cannot requeue itself"
        way = "set scontrol_on_nodes: false, or add its directory to launch.path"
        yield FindingRow("no-scontrol", Severity.ERROR, "capabilities.scontrol_on_nodes", what, way)
    if len(report.busy_ports) > _CLOSE_PORTS * report.looked_at_ports:
        what = f"{len(report.busy_ports)} of {report.looked_at_ports} checked ports are taken"
        yield FindingRow("ports-taken", Severity.WARNING, "ports", what, "choose another range")
    if 0 < report.ephemeral_first <= cluster.ports.last:
        what = f"the kernel gives ports from {report.ephemeral_first} on to connections"
        yield FindingRow("ports-ephemeral", Severity.WARNING, "ports.last", what, "choose a range below")
    for name, problem in (("scratch", report.scratch_problem), ("cache", report.cache_problem)):
        if problem:
            yield FindingRow(f"no-{name}", Severity.ERROR, f"paths.{name}", problem, "correct the path, or its rights")
    if cluster.paths.scratch is None and report.gpus:
        what = "the profile names no disk of the nodes: all ranks compile into the home directory at once"
        way = "name a directory of a local disk (`df -hl` on a node lists them), and run this check again"
        yield FindingRow("scratch-unset", Severity.WARNING, "paths.scratch", what, way)
    if abs(report.clock_ahead_s) > _FAR_CLOCK_S:
        what = f"its clock differs from the filesystem's by {report.clock_ahead_s:+.1f} s"
        way = "run chrony or ntpd; merged logs would mislead"
        yield FindingRow("clock", Severity.WARNING, "paths.runs_root", what, way)


def _hardware(cluster: SlurmCluster, partition: str, report: NodeReport) -> Iterator[FindingRow]:
    node, key = cluster.partitions[partition].node, f"partitions.{partition}.node.interface"
    if not report.has_interface:
        what = f"there is no network interface {node.interface}"
        yield FindingRow("no-interface", Severity.ERROR, "", what, "`ip -br address` on a node lists them")
    elif report.address_problem:
        way = "set `interface` to the one that nodes reach each other on (`ip -br address` on a node lists them)"
        yield FindingRow("no-address", Severity.ERROR, key, report.address_problem, way)
    for other, why in sorted(report.unreached.items()):
        what = f"it does not reach {other}: {why}"
        way = "let nodes connect to each other on the profile's ports, or name another interface"
        yield FindingRow("unreachable", Severity.ERROR, key, what, way)
    if report.missing_nics:
        what = f"there is no adapter {', '.join(report.missing_nics)}"
        yield FindingRow("no-nic", Severity.ERROR, "", what, "`ibv_devices` on a node lists them")
    if node.gpus and report.gpus is None:
        what = "there is no NVIDIA driver, but the profile says that the node has GPUs"
        yield FindingRow("no-driver", Severity.WARNING, "", what, "drain the node, or set gpus: 0")
    elif report.gpus is not None and report.gpus < node.gpus:
        what = f"the driver shows {report.gpus} GPUs, the profile says {node.gpus}"
        yield FindingRow("gpus-missing", Severity.ERROR, "", what, "drain the node, or correct gpus")
    yield from _compilers(cluster, node, report)


def _compilers(cluster: SlurmCluster, node: NodeConfig, report: NodeReport) -> Iterator[FindingRow]:
    """Report a missing compiler, unless an interpreter with Triton has tried it, or roles have that of an image."""
    if not node.gpus:
        if not report.cxx_compiler:
            what = "there is no C++ compiler, which torch needs on processors for trainer.memory.compile"
            way = "install g++, or add its directory to launch.path, where recipes ask for it"
            yield FindingRow("no-compiler", Severity.NOTE, "", what, way)
        return
    tried = any(each.question.library == "Triton" and each.kind == "good" for each in report.libraries)
    outside = isinstance(cluster.container, NoContainer)
    if report.gpus is not None and not report.c_compiler and outside and not tried:
        what = "there is no C compiler, which Triton needs on GPUs: vLLM, sparse attention, FP8 and compiled layers"
        way = "install gcc and the headers of the interpreter, or add the directory of the compiler to launch.path"
        yield FindingRow("no-compiler", Severity.WARNING, "", what, way)


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
