"""The nodes of every partition that roles use, asked by a small job each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.joined import with_account_from_env
from hpcrl.jobplan.environment import network_variables
from hpcrl.sites.check_job import JobReport, check_nodes
from hpcrl.sites.fact_findings import facts_summary
from hpcrl.sites.library_findings import library_summary
from hpcrl.sites.network_findings import network_summary
from hpcrl.sites.node_findings import node_findings
from hpcrl.sites.profile_check import CheckFinding
from hpcrl.slurm.client import SlurmClient


class NodeAnswers(NamedTuple):
    """Results of the small jobs that check a profile.

    Attributes
    ----------
    findings:
        Differences from what a run needs; errors come first within each partition.
    reports:
        Reports by key of the partition.
    """

    findings: list[CheckFinding]
    reports: dict[str, JobReport]


def used_partitions(cluster: SlurmCluster) -> list[str]:
    """Return the keys of the partitions that roles are placed on."""
    return list(dict.fromkeys([cluster.placement.default, *cluster.placement.by_role.values()]))


def ask_nodes(
    cluster: SlurmCluster,
    *,
    client: SlurmClient,
    directory: Path,
    nodes: int,
    wait_s: float,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    working: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> NodeAnswers:
    """Send the job of ``hpcrl cluster check --job`` to each partition that roles use, and judge the answers.

    Parameters
    ----------
    directory:
        The runs root, absolute.
    nodes:
        Nodes of a job; fewer where the partition has fewer.
    wait_s:
        Maximum wait for each job in seconds, queue included.
    environ:
        Variables of the calling user: account, quality of service and reservation may come from there.
    say:
        Takes lines on what is seen.
    working:
        Shows that a job is waited for, while the block runs.

    Raises
    ------
    DeadlineError, HpcrlError
        See `hpcrl.sites.check_job.check_nodes`.
    """
    found, reports = list[CheckFinding](), dict[str, JobReport]()
    cluster = with_account_from_env(cluster, environ)
    for partition in used_partitions(cluster):
        with working(f"waiting for the check's job in {partition}, {wait_s:g} s at most"):
            report = check_nodes(
                cluster,
                partition,
                client=client,
                directory=directory,
                nodes=min(nodes, cluster.partitions[partition].nodes),
                wait_s=wait_s,
                network=network_variables(cluster, partition),
                say=say,
            )
        reports[partition] = report
        say(f"asked: {', '.join(node.host for node in report.nodes)}")
        for line in (
            *library_summary(report.nodes[0].libraries),
            network_summary(report.network),
            *facts_summary([node.facts for node in report.nodes]),
        ):
            say(line)
        found += node_findings(cluster, partition, report.nodes, report.network)
    return NodeAnswers(found, reports)
