"""Writes down in the run's events who was refused by a server of the run, and makes the gates that do."""

from __future__ import annotations

import os
from pathlib import Path

from hpcrl.credentials import Credentials, read_token
from hpcrl.gate import Gate, RefusedRequest, Report
from hpcrl.runs.events import EventWriter
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir

__all__ = ["gate_from_env", "gate_of", "refusal_report"]


def refusal_report(run: RunDir, attempt: int, writer: str) -> Report:
    """A report that makes an event of each refusal; its file is made with the first.

    Parameters
    ----------
    writer:
        Of the events: a name that no other process of the attempt has.
    """
    writers: list[EventWriter] = []

    def report(refused: RefusedRequest) -> None:
        if not writers:
            writers.append(EventWriter(run, attempt=attempt, writer=writer))
        writers[0].emit("access.refused", **refused._asdict())

    return report


def gate_of(context: RoleContext, server: str, *, open_health: bool = False) -> Gate:
    """The gate of a server of a role (RunDirError where the token cannot be read).

    Parameters
    ----------
    server:
        Name of the server; several in one process have different ones.
    open_health:
        See `hpcrl.gate.Gate`.
    """
    # several processes of a replica may serve, on several nodes
    node = os.uname().nodename.partition(".")[0]
    writer = f"access-{context.role}-{context.replica}-{server}-{node}-{os.getpid()}"
    report = refusal_report(context.run, context.attempt, writer)
    return Gate(server, context.credentials, report=report, open_health=open_health)


def gate_from_env(server: str, *, token_file: Path | None = None, open_health: bool = False) -> Gate:
    """The gate of a server that this process is.

    In a run it is that of the role. Outside of one the token is in ``token_file``; without, everybody is answered, on
    loopback only (`hpcrl.gate.Gate.check_host`).

    Raises
    ------
    RunDirError
        The token cannot be read.
    """
    if "HPCRL_RUN_DIR" in os.environ:
        return gate_of(RoleContext.from_env(), server, open_health=open_health)
    credentials = None if token_file is None else Credentials(read_token(token_file))
    return Gate(server, credentials, open_health=open_health)
