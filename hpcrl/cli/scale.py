"""``hpcrl scale``: change the number of replicas of a running run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.output import say
from hpcrl.cli.selection import RunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("scale")(scale)


def scale(
    run: RunArgument,
    counts: Annotated[
        list[str], typer.Argument(metavar="ROLE=NUMBER...", help="Target number of replicas, for example engine=4.")
    ],
    root: RunsRootOption = None,
) -> None:
    """Change the number of replicas of a role. The layout must be elastic, so that each replica has its own job.

    The supervisor submits missing jobs, and ends surplus ones, the highest numbers first. The number also applies to
    later attempts and resumes.
    """
    import getpass

    from hpcrl.errors import RunDirError
    from hpcrl.runs.elastic import Wanted, wanted_replicas
    from hpcrl.runs.observe import observe
    from hpcrl.runs.registry import reference
    from hpcrl.runs.status import RunState

    found = find(run, root)
    wanted = _parse(counts, found)
    view = observe(found)
    if view.state is RunState.COMPLETED:
        raise RunDirError(f"the run {found.name} is completed; there is nothing to scale")
    before = wanted_replicas(found, found.plan())
    Wanted.ask(found, wanted, user=getpass.getuser())
    for role, count in wanted.items():
        say(f"{found.name}: {role} {before[role]} -> {count}")
    if view.state.ended:
        way_on = f"hpcrl resume {reference(found)}"
        say(f"the run has ended ({view.state}); the new number applies when it is resumed: {way_on}", err=True)
    elif view.supervisor is None or view.state is RunState.REQUEUED:
        say("the supervisor applies it when its job has started", err=True)
    else:
        say(f"  hpcrl status {reference(found)} --watch", err=True)


def _parse(counts: list[str], run: RunDir) -> dict[str, int]:
    """Return the numbers by role (UsageError where one cannot be)."""
    from hpcrl.errors import UsageError
    from hpcrl.runs.registry import reference

    plan = run.plan()
    groups = {group.role.value: group for group in plan.groups if plan.own_jobs(group)}
    if not groups:
        raise UsageError(
            f"the replicas of {run.name} have no jobs of their own: its layout is {plan.layout.kind}\n"
            "    hint: submit it under another name with --set job.layout=elastic"
        )
    wanted = {}
    for text in counts:
        role, _, number = text.partition("=")
        if role == "env" and any(group.role.value == role for group in plan.groups):
            raise UsageError(
                f"{text}: workers of environments stay as many as they are when engines come and go\n"
                "    hint: cancel the run, and submit it again with another environment_workers.count"
            )
        if role not in groups or not number.isdecimal():
            raise UsageError(f"{text!r} is not ROLE=NUMBER with a role of {', '.join(sorted(groups))}")
        if int(number) < plan.elastic.min_replicas:
            named = reference(run)
            raise UsageError(
                f"{text}: the run needs at least {plan.elastic.min_replicas} (job.min_replicas)\n"
                f"    hint: stop it for a while: hpcrl cancel {named}, and later hpcrl resume {named}"
            )
        wanted[role] = int(number)
    return wanted
