"""Writes down in the run's events who was refused by a server of the run, and makes the gates that do."""

from __future__ import annotations

import os
from pathlib import Path

from hpcrl.network.auth import Gate, RefusedRequest, Report
from hpcrl.network.credentials import Credentials, read_token
from hpcrl.runs.events import EventWriter
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir


def refusal_report(run: RunDir, attempt: int, writer: str) -> Report:
    """Return a report that writes an event for each refusal; its file is created with the first.

    Parameters
    ----------
    writer:
        Writer of the events: a name that no other process of the attempt has.
    """
    writers: list[EventWriter] = []

    def report(refused: RefusedRequest) -> None:
        if not writers:
            writers.append(EventWriter(run, attempt=attempt, writer=writer))
        writers[0].emit("access.refused", **refused._asdict())

    return report


def gate_of(context: RoleContext, server: str, *, open_health: bool = False) -> Gate:
    """Return the gate of a server of a role.

    Parameters
    ----------
    server:
        Name of the server; several in one process have different names.
    open_health:
        See `hpcrl.network.auth.Gate`.

    Raises
    ------
    RunDirError
        The token cannot be read.
    """
    return Gate(server, context.credentials, report=report_of(context, server), open_health=open_health)


def report_of(context: RoleContext, server: str) -> Report:
    """Return the report of a server of a role, which makes an event of each refusal.

    Parameters
    ----------
    server:
        Name of the server; several in one process have different ones.
    """
    # several processes of a replica may serve, on several nodes
    node = os.uname().nodename.partition(".")[0]
    writer = f"access-{context.role}-{context.replica}-{server}-{node}-{os.getpid()}"
    return refusal_report(context.run, context.attempt, writer)


def gate_from_env(server: str, *, token_file: Path | None = None, open_health: bool = False) -> Gate:
    """Return the gate of a server that runs in this process.

    In a run it is the gate of the role. Outside of a run the token is in ``token_file``; without a token every client
    is accepted, on loopback only (`hpcrl.network.auth.Gate.check_host`).

    Raises
    ------
    RunDirError
        The token cannot be read.
    """
    if "HPCRL_RUN_DIR" in os.environ:
        return gate_of(RoleContext.from_env(), server, open_health=open_health)
    credentials = None if token_file is None else Credentials(read_token(token_file))
    return Gate(server, credentials, open_health=open_health)
