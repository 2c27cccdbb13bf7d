"""Print a resolved plan for ``hpcrl plan`` and ``hpcrl submit --dry-run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.cli.output import markup, table_console

if TYPE_CHECKING:
    from rich.console import Console

    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.load import Loaded
    from hpcrl.config.plan import Plan
    from hpcrl.config.recipe import Recipe


def print_plan(resolved: Plan, site: Loaded[ClusterProfile], *, commands: bool) -> None:
    """Print a plan as a table, with ``commands`` those of each role; ``site`` says where its values come from."""
    import shlex

    from rich.table import Table
    from rich.text import Text

    console = table_console()
    console.print(markup("[bold]{}[/bold]: recipe {} on cluster {}", resolved.run, resolved.recipe, resolved.cluster))
    console.print(f"directory {resolved.run_dir}", highlight=False, soft_wrap=True)
    console.print(
        f"ports     {resolved.first_port}-{resolved.last_port}, chosen at start and recorded in endpoints.json\n",
        highlight=False,
    )
    _print_layout(console, resolved, site)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("role", "replicas", "ranks", "starts after", "ready when", "deadline"):
        table.add_column(column, justify="right" if column in ("replicas", "ranks", "deadline") else "left")
    for group in resolved.groups:
        table.add_row(
            group.role,
            str(group.replicas),
            str(group.ranks),
            ", ".join(group.after) or "-",
            f"GET {group.ready.path}" if group.ready.kind == "http" else "ready file",
            f"{group.start_timeout_s:g} s",
        )
    console.print(table)
    ends = [group.role for group in resolved.groups if group.policy.ends_run]
    rest = "; a clean end of another one is a failure" if len(ends) < len(resolved.groups) else ""
    text = f"\n{resolved.processes} role processes; the run ends with the {' and the '.join(ends)}{rest}."
    console.print(text, highlight=False)
    if not commands:
        return
    console.print("\nCommands:")
    for group in resolved.groups:
        env = "".join(f"{key}={shlex.quote(value)} " for key, value in group.env.items())
        # with Slurm the environment is long: `hpcrl plan --env` shows it
        shown = env if resolved.layout.kind == "local" else ""
        console.print(Text(f"  {group.role}: {shown}{' '.join(group.command)}"), soft_wrap=True)


def _print_layout(console: Console, resolved: Plan, site: Loaded[ClusterProfile]) -> None:
    """Print the jobs of a plan and the nodes of each role."""
    from rich.table import Table

    from hpcrl.planning.spare_worth import spare_worth

    layout, attempts = resolved.layout, resolved.attempts
    if layout.kind == "local":
        return
    console.print(
        f"layout    {layout.kind} ({layout.reason}): {layout.nodes} node{'s' * (layout.nodes != 1)}, {layout.gpus} GPUs"
    )
    console.print(
        f"time      {resolved.time_limit_s / 3600:g} h a job, signal {attempts.signal_lead_s} s before its end, "
        + (
            f"requeued up to {attempts.max_attempts - 1} times" if attempts.requeue else "not requeued (resume by hand)"
        ),
        highlight=False,
    )
    if (worth := spare_worth(resolved, site.value)) is not None:
        for name, line in zip(("spares", "", ""), worth.lines(), strict=True):
            console.print(f"{name:<9} {line}", highlight=False, soft_wrap=True)
    for name, charge in _charges(resolved, site).items():
        console.print(f"{name:<9} {charge}", highlight=False, soft_wrap=True)
    if layout.sbatch_options:
        console.print(f"options   {' '.join(layout.sbatch_options)}", highlight=False, soft_wrap=True)
    if resolved.container is not None:
        console.print(f"container {resolved.container.kind}, {resolved.container.image}", highlight=False)
    console.print()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("role", "component", "partition", "nodes", "of them", "ranks a node", "GPUs"):
        table.add_column(column)
    for group in resolved.groups:
        component = resolved.component(group)
        nodes = group.replicas * group.nodes
        if group.beside:
            row = (f"beside {component.roles[0]}", "first", str(group.ranks_per_node), "-")
        elif group.share is not None:
            gpus = str(group.replicas * group.share.gpus)
            row = (f"{group.replicas} x {group.share.text}", str(group.first_node), str(group.ranks_per_node), gpus)
        else:
            own = component.jobs > 1
            first = group.first_node
            where = "each job its own" if own else f"{first}-{first + nodes - 1}" if nodes > 1 else str(first)
            gpus = str(nodes * component.gpus_per_node)
            row = (f"{group.replicas} x {group.nodes}", where, str(group.ranks_per_node), gpus)
        table.add_row(group.role, str(group.component), component.partition, *row)
    console.print(table)
    console.print()


def _charges(resolved: Plan, site: Loaded[ClusterProfile]) -> dict[str, str]:
    """Print the account of the jobs of each partition, and its source."""
    shown = {}
    for component in resolved.layout.components:
        parts = [
            f"{key} {value} ({site.origin(('partitions', component.partition, key))})"
            for key in ("account", "qos", "reservation")
            if (value := getattr(component, key)) is not None
        ]
        if parts:
            shown[component.partition] = ", ".join(parts)
    return shown


def print_environment(recipe: Recipe, cluster: ClusterProfile, resolved: Plan) -> None:
    """Print the environment of each role, by source."""
    from rich.table import Table

    from hpcrl.jobplan import role_variables

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("role", "variable", "value", "source"):
        table.add_column(column, overflow="fold", no_wrap=column in ("role", "variable"))
    for group in resolved.groups:
        for name, (value, source) in role_variables(recipe, cluster, group.role, resolved.run).items():
            table.add_row(group.role, name, value, source)
        for name, file in cluster.secrets.items():
            table.add_row(group.role, name, f"(read from {file} when the role starts)", "cluster.secrets")
    console = table_console()
    console.print()
    console.print(table)
