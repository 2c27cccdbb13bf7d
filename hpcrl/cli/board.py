"""``hpcrl board``: runs in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.output import say


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("board")(board)


def board(
    roots: Annotated[
        list[str] | None,
        typer.Option(
            "--runs-root",
            metavar="DIRECTORY",
            help="Show only the runs of this directory, for example that of a group. Repeatable.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    allow_remote: Annotated[
        bool,
        typer.Option("--allow-remote", help="Allow an address that other machines reach; traffic is not encrypted."),
    ] = False,
) -> None:
    """Show runs in a browser, live: list, curves, logs, allocation, rollouts, comparisons.

    It prints a link with a token, and answers only who has it. It reads run directories and changes nothing. Without
    --runs-root it shows the runs that `hpcrl ls` lists. Ctrl-C ends it.
    """
    from pathlib import Path

    from hpcrl.analysis.page.plotly_program import read_plotly
    from hpcrl.errors import UsageError
    from hpcrl.processes.daemon_threads import run_process

    read_plotly()  # before what needs arrays, which the same extra brings
    from hpcrl.board.board_server import serve_board

    for root in roots or ():
        if not Path(root).expanduser().is_dir():
            raise UsageError(f"--runs-root {root} is not a directory")
    _ask_slurm()

    def announce(path: str, port: int) -> None:
        for line in _lines(host, port, path, allow_remote):
            say(line)

    run_process(serve_board(roots or [], host=host, port=port, remote=allow_remote, announce=announce))
    say("the board has ended", err=True)


def _ask_slurm() -> None:
    """Let readers of runs ask Slurm, one at a time: pages are made in threads."""
    import threading
    from collections.abc import Sequence

    from hpcrl.runs.job_facts import JobFact, set_job_query
    from hpcrl.runs.record import Submission
    from hpcrl.slurm.lookup import look_up

    one_at_a_time = threading.Lock()

    def query(submissions: Sequence[Submission]) -> dict[str, JobFact]:
        with one_at_a_time:
            return look_up(submissions)

    set_job_query(query)


def _lines(host: str, port: int, path: str, remote: bool) -> list[str]:
    import getpass
    import socket

    from hpcrl.network.auth import is_loopback

    shown = f"[{host}]" if ":" in host else host
    if not is_loopback(host):
        name = socket.gethostname() if host in ("0.0.0.0", "::") else shown
        warning = "warning: anyone who sees the traffic to this port can read the link and the pages"
        return [warning, f"http://{name}:{port}{path}"]
    return [
        f"http://{shown}:{port}{path}",
        "",
        "from another machine, first:",
        f"    ssh -N -L {port}:{shown}:{port} {getpass.getuser()}@{socket.gethostname()}",
        "Ctrl-C ends the board",
    ]
