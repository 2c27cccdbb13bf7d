"""``hpcrl wait``: wait until runs have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.following import exit_code, tell_what_failed
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunsArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.runs.observe import RunView


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("wait")(wait)


def wait(
    runs: RunsArgument,
    running: Annotated[
        bool, typer.Option("--running", help="Wait until all roles are ready, not until the end.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Maximum wait for all runs together.")
    ] = None,
    root: RunsRootOption = None,
) -> None:
    """Wait until runs have ended, and print the state of each. Ctrl-C ends the waiting, not the runs.

    Exit code: that of the first run, as they are named, that was not completed: 1 failed, or not ended in time, 93
    given up without progress, 130 cancelled; 0 where all were. With --running 0 where all roles of all runs are ready,
    or were.
    """
    import time

    from hpcrl.runs.status import RunState
    from hpcrl.runs.waiting import wait_for_state

    found = [find(run, root) for run in runs]
    end_s = None if timeout is None else time.monotonic() + timeout
    codes = []
    for run in found:

        def tell(view: RunView, name: str = run.name) -> None:
            say(f"{name}: {view.state}", err=True)

        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        view = wait_for_state(run, running=running, timeout_s=left_s, told=tell)
        say(f"{run.name}: {view.state}")
        if view.state is RunState.RUNNING:
            continue
        codes.append(exit_code(view))
        if view.state is not RunState.COMPLETED:
            tell_what_failed(run)
    raise typer.Exit(next((code for code in codes if code), 0))
