"""``hpcrl plan``: what a submit would start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hpcrl.cli.options import ClusterOption, JsonOption, RecipeArgument, SetOption

if TYPE_CHECKING:
    from hpcrl.config.plan import Plan

__all__ = ["print_plan", "register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    recipe: RecipeArgument,
    cluster: ClusterOption = "local",
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the resolved plan: roles, processes, order, directories. Changes nothing."""
    import time
    from pathlib import Path

    from hpcrl.config.load import load_cluster, load_recipe
    from hpcrl.config.rules import check_rules
    from hpcrl.planning import absolute_paths, default_run_name, make_plan, resolve_runs_root

    loaded, site = load_recipe(recipe, overrides or ()), load_cluster(cluster)
    check_rules(loaded, site)
    cwd = Path.cwd()
    name = default_run_name(loaded.value, time.time())
    resolved = make_plan(absolute_paths(loaded.value, cwd), site.value, name, resolve_runs_root(site.value, cwd) / name)
    if as_json:
        typer.echo(resolved.model_dump_json(indent=2))
    else:
        print_plan(resolved)


def print_plan(resolved: Plan) -> None:
    """Print a plan as a table and the commands of each role."""
    import shlex

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(f"[bold]{resolved.run}[/bold]: recipe {resolved.recipe} on cluster {resolved.cluster}")
    console.print(f"directory {resolved.run_dir}", highlight=False, soft_wrap=True)
    console.print(
        f"ports     {resolved.first_port}-{resolved.last_port}, chosen at start and recorded in endpoints.json\n",
        highlight=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("role", "replicas", "ranks", "starts after", "ready when", "deadline", "its clean end"):
        table.add_column(column)
    for group in resolved.groups:
        table.add_row(
            group.role,
            str(group.replicas),
            str(group.ranks),
            ", ".join(group.after) or "-",
            f"GET {group.ready.path}" if group.ready.kind == "http" else "ready file",
            f"{group.start_timeout_s:g} s",
            "ends the run" if group.policy.ends_run else "is a failure",
        )
    console.print(table)
    console.print(f"\n{resolved.processes} role processes. Commands:")
    for group in resolved.groups:
        env = "".join(f"{key}={shlex.quote(value)} " for key, value in group.env.items())
        console.print(Text(f"  {group.role}: {env}{' '.join(group.command)}"), soft_wrap=True)
