"""Stages before anything is run: the profile, the running Slurm, the nodes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from hpcrl.bringup.node_jobs import ask_nodes, used_partitions
from hpcrl.bringup.stage import FirstRunRequest, Outcome, SiteBench, StageStoppedError, quoted, stop_at_errors
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.rules.table import SITE_RULES, check_cluster
from hpcrl.errors import ConfigError, UsageError
from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.sites.draft_machine import draft_of_machine
from hpcrl.sites.fact_findings import facts_summary
from hpcrl.sites.library_findings import library_summary
from hpcrl.sites.network_findings import network_summary
from hpcrl.sites.profile_check import check_profile
from hpcrl.sites.site_facts import read_site_facts
from hpcrl.storage.files import atomic_write

_DIRECTORY_S = 30.0
"""Maximum time in seconds of making a file in the runs root; a mount that hangs takes any time."""


def describe_site(bench: SiteBench) -> Outcome:
    """Draft the profile from Slurm where there is none, as ``hpcrl cluster init`` does, and read it."""
    request = bench.request
    path = Path("clusters", f"{request.cluster}.yaml")
    drafted = not request.is_there
    if drafted:
        _check_name(request.cluster)
        text = draft_of_machine(
            bench.client,
            request.cluster,
            runs_root=request.runs_root,
            fabric=request.fabric,
            python=request.python,
            vllm_python=request.vllm_python,
        )
        target = request.cwd / path
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, text.encode())
        bench.say(f"drafted {path}")
    try:
        loaded = bench.profile()
    except ConfigError as error:
        raise StageStoppedError(
            f"{error}\n    hint: fill in what the file lacks: docs/admins.md says how to find out",
            commands=[f"{os.environ.get('EDITOR', 'vi')} {quoted(path)}"] if not request.is_file else [],
        ) from error
    facts = {"profile": str(loaded.source), "drafted": drafted}
    differ = _differing(request, loaded.value)
    if differ:
        what = f"{loaded.source} existed before and differs from {', '.join(differ)}: these options changed nothing"
        return Outcome(summary=f"{loaded.source} is there", warnings=(what,), facts=facts)
    return Outcome(summary=f"{loaded.source} {'was drafted' if drafted else 'is there'}", facts=facts)


def _differing(request: FirstRunRequest, cluster: SlurmCluster) -> list[str]:
    """Return the options of a draft that the profile does not follow."""
    python = {str(role): each for role, each in cluster.python_by_role.items()}.get("trainer")
    written: dict[str, tuple[str | None, set[str | None]]] = {
        "--runs-root": (request.runs_root, {cluster.paths.runs_root}),
        "--fabric": (request.fabric, {each.node.fabric.kind for each in cluster.partitions.values()}),
        "--python": (request.python, {python}),
        "--vllm-python": (request.vllm_python, {cluster.vllm_python}),
    }
    return [option for option, (given, its) in written.items() if given is not None and given not in its]


def _check_name(name: str) -> None:
    """Refuse what cannot be the name of a profile (UsageError)."""
    if not name or name.startswith((".", "-")) or not all(c.isalnum() or c in "._-" for c in name):
        raise UsageError(
            f"{name!r} cannot be the name of a profile\n    hint: letters, digits, `-`, `_` and `.`, or a file"
        )


def check_site(bench: SiteBench) -> Outcome:
    """Compare the profile with its rules and with the running Slurm, as ``hpcrl cluster check`` does."""
    loaded = bench.profile()
    check_cluster(loaded)
    facts_of_slurm = read_site_facts(bench.client)
    version = "{}.{:02d}".format(*facts_of_slurm.version)
    facts = {"slurm": version, "slurm_cluster": facts_of_slurm.cluster}
    command = f"hpcrl cluster check {quoted(bench.request.cluster)}"
    warnings = stop_at_errors(loaded, check_profile(loaded.value, facts_of_slurm), facts, command)
    root = bench.runs_root(loaded.value)
    within(_DIRECTORY_S, lambda: try_directory(root), f"{root}, the runs root (paths.runs_root of {loaded.source})")
    summary = f"{len(SITE_RULES)} rules hold, Slurm {version} has what the profile says, {root} can be written"
    return Outcome(summary=summary, warnings=warnings, facts={**facts, "runs_root": str(root)})


def try_directory(path: Path) -> None:
    """Make a file in a directory and remove it; the directory is made where it is missing."""
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    probe = path / f".hpcrl-first-run-{uuid.uuid4().hex[:8]}"
    try:
        probe.write_bytes(b"x")
    finally:
        probe.unlink(missing_ok=True)


def within(seconds: float, call: Callable[[], object], what: str) -> None:
    """Call something that may hang in a thread of its own.

    Raises
    ------
    StageStoppedError
        The filesystem refuses, or does not answer in time.
    """
    executor = DaemonExecutor(1)
    future = executor.submit(call)
    try:
        future.result(seconds)
    except FutureTimeoutError:
        raise StageStoppedError(
            f"{what} did not answer within {seconds:g} s\n"
            "    hint: its mount hangs: `stat` it in a shell of its own, and ask who runs the filesystem"
        ) from None
    except OSError as error:
        raise StageStoppedError(
            f"{what} cannot be written: {error}\n    hint: correct the path, or its rights"
        ) from error
    finally:
        executor.shutdown(wait=False)


def ask_the_nodes(bench: SiteBench) -> Outcome:
    """Let nodes tell what only they know, as ``hpcrl cluster check --job`` does."""
    loaded = bench.profile()
    cluster = loaded.value
    answers = ask_nodes(
        cluster,
        client=bench.client,
        directory=bench.runs_root(cluster),
        nodes=bench.request.nodes,
        wait_s=bench.request.wait_s,
        environ=bench.request.environ,
        say=bench.say,
    )
    facts: dict[str, Any] = {"gpus": {}, "nodes": {}, "libraries": [], "network": {}, "seen": {}}
    for partition, report in answers.reports.items():
        # GPUs that a driver reports: a profile may count some that do not exist, as on a virtual cluster
        facts["gpus"][partition] = min(node.gpus or 0 for node in report.nodes)
        facts["nodes"][partition] = [node.host for node in report.nodes]
        facts["libraries"] += [
            line for line in library_summary(report.nodes[0].libraries) if line not in facts["libraries"]
        ]
        facts["network"][partition] = network_summary(report.network)
        facts["seen"][partition] = list(facts_summary([node.facts for node in report.nodes]))
    command = f"hpcrl cluster check {quoted(bench.request.cluster)} --job"
    warnings = stop_at_errors(loaded, answers.findings, facts, command)
    asked = sum(len(nodes) for nodes in facts["nodes"].values())
    partitions = ", ".join(answers.reports)
    return Outcome(summary=f"{asked} nodes of {partitions} answered well", warnings=warnings, facts=facts)


def queues_of_check(bench: SiteBench) -> int:
    """Return how many jobs `ask_the_nodes` sends, one after the other."""
    return len(used_partitions(bench.profile().value))
