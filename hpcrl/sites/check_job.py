"""The small job of ``hpcrl cluster check --job``: submitted, waited for, and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.cluster_slurm import NodeConfig
from hpcrl.errors import HpcrlError
from hpcrl.sites.library_probe import library_questions
from hpcrl.sites.network_check import NETWORK, NetworkPlan, NetworkReport
from hpcrl.sites.node_report import QUESTIONS, NodeQuestions, NodeReport, read_reports
from hpcrl.sites.small_job import SmallJob, end_of_log, job_directory, run_small_job
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.states import JobState
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared

JOB_MINUTES = 20
"""Time limit of the job. A command that waits for it waits longer, because the job is queued first."""
_ENDED_S, _FAILED_S = 30.0, 5.0
"""Timeouts in seconds for the last report of a job that has ended, and of one that has failed, which most likely has
none."""
_SLOW_SHARE = 0.5
"""Share of the profile's ``nics.gb_s`` below which the network of a node is slow."""
_CPUS = 4
_NCCL_ELEMENTS, _GLOO_ELEMENTS = 1 << 26, 1 << 20
"""32-bit elements of a collective of one rank: large enough for its rate, small enough for memory and patience."""


class JobReport(NamedTuple):
    """Results of the job: a report of each node, and the measurements of the network between them."""

    nodes: list[NodeReport]
    network: NetworkReport


def check_nodes(
    cluster: SlurmCluster,
    partition: str,
    *,
    client: SlurmClient,
    directory: Path,
    nodes: int,
    wait_s: float,
    network: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> JobReport:
    """Run the check on some nodes of a partition and return their reports. Its files are removed.

    Parameters
    ----------
    directory:
        The runs root: the job's files are below it, because nodes must see them.
    nodes:
        Number of nodes; two or more measure the lag of the filesystem.
    wait_s:
        Longest wait, queue included; then the job is cancelled.
    network:
        Variables of a trainer's ranks on these nodes: the settings of NCCL and Gloo.

    Raises
    ------
    DeadlineError
        The job has not ended in time.
    HpcrlError
        It failed before every node had answered; the message has its last words.
    """
    site = cluster.partitions[partition]
    with job_directory(directory) as work:
        write_json(work / QUESTIONS, _questions(cluster, partition, nodes, network or {}))
        job = _job(cluster, partition, nodes, work, wait_s=wait_s)
        ended = run_small_job(cluster, job, client=client, say=say)
        failed = ended.state is not JobState.COMPLETED
        reports = _read(work, nodes, ended.job_id, late_s=_FAILED_S if failed else _ENDED_S)
        if nodes > 1 and not any(report.address_problem or report.unreached for report in reports):
            on = site.node.interface or "the addresses that Slurm has"
            places = ", ".join(f"{report.host} {report.address}" for report in reports)
            say(f"each node reaches each other one on {on}: {places}")
        return JobReport(reports, _network(work))


def _questions(cluster: SlurmCluster, partition: str, nodes: int, network: Mapping[str, str]) -> NodeQuestions:
    site = cluster.partitions[partition]
    libraries = library_questions(cluster, partition)
    # the trainer's question comes first
    torch = next((question for question in libraries if question.library == "torch"), None)
    return NodeQuestions(
        nodes=nodes,
        first_port=cluster.ports.first,
        last_port=cluster.ports.last,
        interface=site.node.interface,
        nics=tuple(nic.name for nic in site.node.nics),
        scratch=cluster.paths.scratch,
        cache=cluster.paths.cache,
        libraries=tuple(libraries),
        gpus=site.node.gpus,
        network=None
        if torch is None
        else NetworkPlan(
            python=torch.python,
            backend="nccl" if site.node.gpus else "gloo",
            ranks_per_node=max(1, site.node.gpus),
            elements=_NCCL_ELEMENTS if site.node.gpus else _GLOO_ELEMENTS,
            loops=10 if site.node.gpus else 5,
            first_port=cluster.ports.first,
            last_port=cluster.ports.last,
            least_gb_s=_least_gb_s(site.node),
            environ={**torch.environ, **network},
            step_options=_gpu_options(cluster, site.node),
        ),
        step_options=tuple(_gpu_options(cluster, site.node)),
    )


def _least_gb_s(node: NodeConfig) -> float | None:
    """Return the rate of a node below which its network is slow; None where the profile has no rates of adapters."""
    rates = [nic.gb_s for nic in node.nics]
    if not node.gpus or not rates or None in rates:
        return None
    return _SLOW_SHARE * sum(rate for rate in rates if rate is not None)


def _gpu_options(cluster: SlurmCluster, node: NodeConfig) -> list[str]:
    """Return how all GPUs of a node are asked for, of a job and of its steps."""
    if not node.gpus or cluster.gres == "none":
        return []
    kind = "" if node.gpu_type is None else f"{node.gpu_type}:"
    return [f"--gres=gpu:{kind}{node.gpus}" if cluster.gres == "gres" else f"--gpus-per-node={kind}{node.gpus}"]


def _node_options(cluster: SlurmCluster, node: NodeConfig) -> list[str]:
    """Return what the job asks for of each node: all of it where it has GPUs, each of which is tried."""
    if not node.gpus:
        # CPUs for several imports at once
        return [f"--cpus-per-task={min(_CPUS, node.cpus)}"]
    if cluster.capabilities.exclusive:
        return [*_gpu_options(cluster, node), "--exclusive", "--mem=0"]
    return [
        *_gpu_options(cluster, node),
        f"--cpus-per-task={node.cpus}",
        f"--mem={int(node.memory_gib * 1024)}M",
    ]


def _job(cluster: SlurmCluster, partition: str, nodes: int, work: Path, *, wait_s: float) -> SmallJob:
    site = cluster.partitions[partition]
    options = [f"--partition={partition}", f"--time=0:{JOB_MINUTES}:00"]
    options += [f"--nodes={nodes}", "--ntasks-per-node=1", *_node_options(cluster, site.node)]
    for name in ("account", "qos", "reservation", "constraint"):
        if (value := getattr(site, name)) is not None:
            options.append(f"--{name}={value}")
    return SmallJob(work, "hpcrl.sites.check_batch", options, f"{nodes} nodes of {partition}", wait_s)


def _read(work: Path, nodes: int, job_id: int, *, late_s: float) -> list[NodeReport]:
    found = read_reports(work, nodes, late_s=late_s)
    if len(found) == nodes:
        return found
    raise HpcrlError(
        f"{len(found)} of {nodes} nodes answered the check's job {job_id}; the end of its log:\n{end_of_log(work)}\n"
        "    hint: nodes must see the runs root and this Python under the same paths"
    )


def _network(work: Path) -> NetworkReport:
    """Return what the batch process has written of the network before it ended."""
    try:
        return msgspec.json.decode((work / NETWORK).read_bytes(), type=prepared(NetworkReport))
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        return NetworkReport(skipped=f"its report cannot be read: {error}")
