"""``hpcrl cluster init`` and ``check``: profiles and the Slurm that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.completion import complete_clusters
from hpcrl.cli.configuration import cluster_app
from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import say, table_console

if TYPE_CHECKING:
    from hpcrl.config.cluster import SlurmCluster
    from hpcrl.sites.profile_check import CheckFinding
    from hpcrl.sites.site_facts import SlurmFacts


def register(app: typer.Typer) -> None:
    """Add the commands to ``hpcrl cluster``."""
    cluster_app.command("init")(init)
    cluster_app.command("check")(check)


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new profile.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: clusters/NAME.yaml.")
    ] = None,
    runs_root: Annotated[
        str | None, typer.Option("--runs-root", metavar="DIR", help="A directory visible on all nodes.")
    ] = None,
    fabric: Annotated[
        str | None, typer.Option("--fabric", metavar="KIND", help="infiniband, roce or ethernet.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            "--python",
            metavar="PATH",
            help="Python interpreter of roles on nodes; by default the current one if it has torch.",
        ),
    ] = None,
    vllm_python: Annotated[
        str | None,
        typer.Option(
            "--vllm-python", metavar="PATH", help="Python interpreter of vLLM engines; by default that of roles."
        ),
    ] = None,
) -> None:
    """Draft a cluster profile from the Slurm of this machine. Overwrites nothing.

    Values that Slurm cannot give are marked CHANGE_ME; the profile is refused until you have replaced them. On a
    compute node (srun) it also writes the adapters of that node's partitions, each with its nearest GPUs.
    """
    from hpcrl.errors import UsageError
    from hpcrl.sites.draft_machine import draft_of_machine
    from hpcrl.storage.files import atomic_write

    path = output or Path("clusters") / f"{name}.yaml"
    if path.exists():
        raise UsageError(f"{path} exists already\n    hint: choose another name, or move it away")
    text = draft_of_machine(_slurm(), name, runs_root=runs_root, fabric=fabric, python=python, vllm_python=vllm_python)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text.encode())
    say(path)
    say(f"review it, then: hpcrl cluster check {path}", err=True)


def check(
    cluster: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Cluster profile: a name or a file.", autocompletion=complete_clusters),
    ],
    job: Annotated[
        bool, typer.Option("--job", help="Also submit a small job to each partition, for checks that need a node.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of that job; two measure the lag of the filesystem.")] = 2,
    wait_s: Annotated[float, typer.Option("--wait", metavar="SECONDS", help="Maximum wait for that job.")] = 1800.0,
    as_json: JsonOption = False,
) -> None:
    """Check a profile: its values, rules and secrets, and its agreement with the running Slurm (with --job, its nodes).

    Exit code: 0 good, 1 differs from Slurm in what would make jobs fail, 2 the profile itself is wrong.
    """
    import json

    from rich.text import Text

    from hpcrl.config.cluster import SlurmCluster
    from hpcrl.config.rules.table import SITE_RULES
    from hpcrl.errors import ExitCode
    from hpcrl.sites.profile_check import Severity, check_profile
    from hpcrl.sites.site_facts import read_site_facts
    from hpcrl.submit.prepare import prepare_site

    loaded = prepare_site(cluster, Path.cwd())
    found = []
    if isinstance(loaded.value, SlurmCluster):
        found = check_profile(loaded.value, read_site_facts(_slurm()))
        if job:
            found += _ask_nodes(loaded.value, nodes, wait_s)
    rows = [
        {
            "code": f.code,
            "severity": f.severity.value,
            "where": loaded.where(f.key),
            "key": f.key,
            "what": f.what,
            "hint": f.hint,
        }
        for f in found
    ]
    failed = any(finding.severity is Severity.ERROR for finding in found)
    if as_json:
        say(json.dumps({"format_version": 1, "profile": str(loaded.source), "findings": rows}, indent=2))
        raise typer.Exit(ExitCode.FAILED if failed else ExitCode.OK)
    console = table_console()
    colors = {"error": "red", "warning": "yellow", "note": "dim"}
    for row in rows:
        head = Text(f"{row['severity']:8}", style=colors[row["severity"]])
        console.print(head + Text(f"{row['where']}: {row['key']}: {row['what']} [{row['code']}]"), soft_wrap=True)
        console.print(Text(f"        hint: {row['hint']}"), soft_wrap=True)
    counts = ", ".join(f"{sum(f.severity is s for f in found)} {s.value}s" for s in Severity)
    against = f"against Slurm: {counts}" if loaded.value.uses_slurm else "it has no Slurm to ask"
    console.print(f"{loaded.source}: {len(SITE_RULES)} rules checked; {against}", highlight=False)
    raise typer.Exit(ExitCode.FAILED if failed else ExitCode.OK)


def _ask_nodes(cluster: SlurmCluster, nodes: int, wait_s: float) -> list[CheckFinding]:
    import os

    from hpcrl.bringup.node_jobs import ask_nodes
    from hpcrl.cli.progress import working
    from hpcrl.cli.selection import runs_root
    from hpcrl.slurm.client import SlurmClient

    answers = ask_nodes(
        cluster,
        client=SlurmClient(),
        directory=runs_root(None, cluster),
        nodes=nodes,
        wait_s=wait_s,
        environ=os.environ,
        say=lambda text: say(text, err=True),
        working=working,
    )
    return answers.findings


def _slurm() -> SlurmFacts:
    """Return the facts about the Slurm of this machine."""
    from hpcrl.cli.slurm import reachable_slurm

    return reachable_slurm()
