"""``hpcrl devcluster``: a real Slurm of many virtual nodes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import JsonOption, confirm
from hpcrl.cli.output import markup, say, table_console

if TYPE_CHECKING:
    from hpcrl.devcluster.dev_cluster import ClusterStatus, DevCluster

devcluster_app = typer.Typer(
    help="A real Slurm of many virtual nodes on this machine, to try hpcrl without a cluster.",
    no_args_is_help=True,
)

NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the virtual cluster.")]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        envvar="HPCRL_DEVCLUSTER_HOME",
        help="Directory of virtual clusters; ~/.local/share/hpcrl/devcluster by default.",
    ),
]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Name of a node, for example dev-003.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(devcluster_app, name="devcluster")


@devcluster_app.command("up")
def up(
    name: NameOption = "dev",
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 28,
    gpus: Annotated[int, typer.Option(help="GPUs of a node (fake: Slurm counts them).")] = 8,
    gpu_type: Annotated[str, typer.Option(help="Type of the GPUs.")] = "h200",
    cpus: Annotated[int, typer.Option(help="Cores of a node, as Slurm believes.")] = 8,
    memory_mib: Annotated[int, typer.Option(help="Memory of a node in MiB, as Slurm believes.")] = 2000,
    accounting: Annotated[
        bool, typer.Option("--accounting", help="With slurmdbd and MariaDB, so that sacct works.")
    ] = False,
    stale_s: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Each node sees shared/ through caches of this age, as over NFS (root, bindfs)."
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Start a virtual cluster and wait until all nodes are ready for jobs."""
    import time

    from hpcrl.devcluster.dev_cluster import DevCluster, limits_of_user
    from hpcrl.devcluster.settings import ClusterSettings

    started = time.monotonic()
    cluster = DevCluster.named(name, home)
    settings = ClusterSettings(
        name=name,
        nodes=nodes,
        gpus=gpus,
        gpu_type=gpu_type,
        cpus=cpus,
        memory_mib=memory_mib,
        accounting=accounting,
        stale_s=stale_s,
    )
    record = cluster.up(settings)
    if limits := limits_of_user():
        say(limits, err=True)
    first, last = record.nodes[0].name, record.nodes[-1].name
    say(f"{name}: {nodes} nodes ({first} to {last}) ready after {time.monotonic() - started:.1f} s")
    say(f'  use it:  hpcrl devcluster shell --name {name}      (or: eval "$(hpcrl devcluster env --name {name})")')
    say(f"  end it:  hpcrl devcluster down --name {name}")
    say(f"  files:   {cluster.paths.root}")


@devcluster_app.command("down")
def down(
    name: NameOption = "dev",
    home: HomeOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """End a virtual cluster: its daemons, its jobs, its directory."""
    cluster = _cluster(name, home)
    entries = cluster.shared_entries()
    if entries and not yes:
        some = ", ".join(entries[:5]) + (" …" if len(entries) > 5 else "")
        confirm(f"{cluster.paths.shared} holds {len(entries)} entries ({some}). Delete them?")
    cluster.down()
    say(f"{name}: ended, {cluster.paths.root} removed")


@devcluster_app.command("status")
def status(name: NameOption = "dev", home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show daemons and nodes of a virtual cluster."""
    import json

    import msgspec

    found = _cluster(name, home).status()
    if as_json:
        say(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        _print_status(found)


@devcluster_app.command("ls")
def list_(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the virtual clusters of this machine."""
    import json

    from rich.table import Table

    from hpcrl.devcluster.daemons import find_processes
    from hpcrl.devcluster.dev_cluster import list_dev_clusters

    rows = [
        {
            "name": cluster.paths.root.name,
            "nodes": cluster.record().settings.nodes,
            "processes": len(find_processes(cluster.paths)),
            "path": str(cluster.paths.root),
        }
        for cluster in list_dev_clusters(home)
    ]
    if as_json:
        say(json.dumps(rows, indent=2))
        return
    if not rows:
        say("there is no virtual cluster; hpcrl devcluster up makes one", err=True)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "nodes", "processes", "path"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    table_console().print(table)


@devcluster_app.command("kill-node")
def kill_node(
    node: NodeArgument,
    name: NameOption = "dev",
    home: HomeOption = None,
    unnoticed: Annotated[
        bool, typer.Option("--unnoticed", help="Do not tell the controller: it notices after its time-out.")
    ] = False,
) -> None:
    """Take a node away at once, with all that runs on it, as a power failure would."""
    count = _cluster(name, home).kill_node(node, noticed=not unnoticed)
    say(f"{node}: {count} processes killed" + ("" if unnoticed else ", the node is DOWN"))


@devcluster_app.command("revive-node")
def revive_node(node: NodeArgument, name: NameOption = "dev", home: HomeOption = None) -> None:
    """Bring a node back and wait until jobs could run on it."""
    _cluster(name, home).revive_node(node)
    say(f"{node}: usable")


@devcluster_app.command("pause-controller")
def pause_controller(
    name: NameOption = "dev",
    home: HomeOption = None,
    kill: Annotated[
        bool,
        typer.Option("--kill", help="Kill slurmctld (connections are refused) instead of freezing it (they hang)."),
    ] = False,
) -> None:
    """Let slurmctld stop answering. Running jobs continue."""
    _cluster(name, home).pause_controller(kill=kill)
    say(f"{name}: slurmctld is {'killed' if kill else 'frozen'}; hpcrl devcluster resume-controller brings it back")


@devcluster_app.command("resume-controller")
def resume_controller(name: NameOption = "dev", home: HomeOption = None) -> None:
    """Let slurmctld answer again; one that was killed is started with what it knew."""
    _cluster(name, home).resume_controller()
    say(f"{name}: slurmctld answers")


@devcluster_app.command("shell")
def shell(name: NameOption = "dev", home: HomeOption = None) -> None:
    """Start a shell in which sbatch, squeue and hpcrl use the virtual cluster."""
    import os

    environment = _cluster(name, home).environment()
    program = os.environ.get("SHELL", "/bin/sh")
    say(f"{name}: SLURM_CONF is set in this shell; `exit` leaves it", err=True)
    os.execvpe(program, [program], {**os.environ, **environment})


@devcluster_app.command("env")
def env(name: NameOption = "dev", home: HomeOption = None) -> None:
    """Print what sets a shell or script up for the virtual cluster, for eval."""
    import shlex

    for key, value in _cluster(name, home).environment().items():
        say(f"export {key}={shlex.quote(value)}")


def _cluster(name: str, home: Path | None) -> DevCluster:
    from hpcrl.devcluster.dev_cluster import DevCluster

    return DevCluster.named(name, home)


def _print_status(found: ClusterStatus) -> None:
    from rich.table import Table

    console = table_console()
    console.print(
        markup("[bold]{}[/bold]: Slurm {}, slurmctld {}, ", found.name, found.slurm_version, found.controller)
        + f"{'with' if found.accounting else 'without'} accounting, {found.processes} processes, "
        + f"{found.memory_bytes / (1 << 20):.0f} MiB",
        highlight=False,
    )
    console.print(f"SLURM_CONF={found.conf}\n", highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("node", "address", "slurmd", "state"):
        table.add_column(column)
    for node in found.nodes:
        alive = "runs" if node.alive else markup("[red]dead[/red]")
        table.add_row(node.name, node.address, alive, "+".join(node.states) or "?")
    console.print(table)
