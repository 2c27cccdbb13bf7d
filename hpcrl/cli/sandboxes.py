"""``hpcrl env sandbox``: how the limits of sandboxes hold on this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import json_text, say

if TYPE_CHECKING:
    from hpcrl.sandboxes.limits_report import LimitsReport


def register(group: typer.Typer) -> None:
    """Add the command to the group ``env``."""
    group.command("sandbox")(sandbox)


def sandbox(as_json: JsonOption = False) -> None:
    """Try to break each limit of a sandbox on this node, and show how it holds.

    It takes some seconds and needs bubblewrap. Run it where environments will run: limits differ between nodes.

    Exit code: 0 all limits hold, 1 one does not or no sandbox starts.
    """
    from hpcrl.cli.progress import working
    from hpcrl.errors import ExitCode
    from hpcrl.processes.daemon_threads import run_process
    from hpcrl.sandboxes.limits_report import limits_report

    with working("trying to break the limits of a sandbox"):
        report = run_process(limits_report())
    if as_json:
        say(json_text({"format_version": 1, **report_document(report)}))
    else:
        for line in report_lines(report):
            say(line)
    raise typer.Exit(ExitCode.OK if report.held else ExitCode.FAILED)


def report_document(report: LimitsReport) -> dict[str, object]:
    """Return a report for JSON."""
    checks = [{"limit": each.limit, "held": each.held, "how": each.how} for each in report.checks]
    return {"problem": report.problem, "held": report.held, "checks": checks}


def report_lines(report: LimitsReport) -> list[str]:
    """Return the lines of a report: one for each limit."""
    if report.problem:
        return [f"no sandbox starts here: {report.problem}"]
    width = max(len(each.limit) for each in report.checks)
    return [f"{each.limit:{width}}  {'holds' if each.held else 'NOT HELD'}  {each.how}" for each in report.checks]
