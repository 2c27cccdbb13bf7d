"""``hpcrl notify``: send a message on trial, and list those of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import ClusterOption, JsonOption
from hpcrl.cli.output import json_text, say, table_console
from hpcrl.cli.selection import OptionalRunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.outlets import NotifierConfig

notify_app = typer.Typer(help="Messages about runs.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    notify_app.command("test")(send_test)
    notify_app.command("ls")(list_notices)
    app.add_typer(notify_app, name="notify")


def send_test(
    target: Annotated[str, typer.Argument(metavar="RUN|RECIPE", help="A run, or a recipe: its notifiers are used.")],
    only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="Only this one. Repeatable.")] = None,
    cluster: ClusterOption = "local",
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Send a test message by each notifier of a run, or of a recipe with its profile and your own file, once.

    It is sent from this machine, with `env` and `secrets` of the profile. Nodes of a cluster may have no way to the
    same servers.

    Exit code: 1 one of them was not sent.
    """
    from hpcrl.errors import ExitCode
    from hpcrl.jobplan.role_python import outlet_environment
    from hpcrl.runs.outlets.notices.sample import send_sample

    name, notifiers, site = _notifiers(target, cluster, root)
    environ = outlet_environment(site)
    wanted = [each for each in notifiers if not only or each.name in only]
    results = {each.name: send_sample(each, name, environ) for each in wanted}
    if as_json:
        rows = {key: {"outcome": each.outcome, "why": each.why} for key, each in results.items()}
        say(json_text({"schema": "hpcrl.notify-test/1", "notifiers": rows}))
    for key, each in results.items() if not as_json else ():
        say(f"{key}: {each.outcome}" + (f": {each.why}" if each.why else ""))
    if not results:
        say(
            f"{target} has no such notifier" if only else f"{target} has no notifiers (docs/notifications.md)", err=True
        )
    if any(each.outcome != "sent" for each in results.values()):
        raise typer.Exit(ExitCode.FAILED)


def list_notices(run: OptionalRunArgument = None, as_json: JsonOption = False, root: RunsRootOption = None) -> None:
    """List the messages of a run: when, by which notifier, and what became of each."""
    import time

    import msgspec
    from rich.table import Table

    from hpcrl.runs.notice_claims import read_claims

    found = read_claims(find(run, root))
    if as_json:
        rows = [{"notifier": notifier, "notice": key, **msgspec.to_builtins(claim)} for notifier, key, claim in found]
        say(json_text({"schema": "hpcrl.notices/1", "notices": rows}))
        return
    table = Table("time", "notifier", "message", "outcome", "why", box=None)
    for notifier, key, claim in found:
        clock = time.strftime("%m-%d %H:%M:%S", time.localtime(claim.time_s))
        table.add_row(clock, notifier, key, claim.outcome or "being sent", claim.why)
    table_console().print(table)


def _notifiers(target: str, cluster: str, root: str | None) -> tuple[str, Sequence[NotifierConfig], ClusterProfile]:
    """Return the name of the run or the recipe, its notifiers, and its profile."""
    import os

    from hpcrl.config.joined import load_both
    from hpcrl.config.user_file import load_user_notifiers
    from hpcrl.errors import HpcrlError

    try:
        run = find(target, root)
    except HpcrlError as error:
        try:
            recipe, site = load_both(target, cluster, environ=os.environ)
        except HpcrlError as other:
            # a name that is neither: what is wrong with a file of this name is what one wants to read
            raise (other if os.path.exists(target) else error) from None
        named = {each.name: each for each in load_user_notifiers().value.notify}
        named |= {each.name: each for each in (*site.value.notify, *recipe.value.notify)}
        return recipe.value.name, list(named.values()), site.value
    return run.name, run.plan().notify, run.cluster()
