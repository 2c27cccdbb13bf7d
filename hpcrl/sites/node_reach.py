"""Check that each node of the small job reaches each other one, on the addresses that a run would use.

The batch process asks the nodes for their addresses, as a supervisor does, and passes them on by the environment. Each
node then listens on its own, on a port of the profile's range, publishes it, and connects to all others.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.network.ports import choose_ports
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError
from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.launch_arguments import step_environment
from hpcrl.storage.files import atomic_write
from hpcrl.storage.msgspec_types import prepared
from hpcrl.supervisor.launch.addresses import choose_addresses
from hpcrl.supervisor.launch.survey import Survey

_VARIABLE = "CHECK_ADDRESSES"
_ASK_S = 60.0
_MEET_S = 60.0
"""Longest wait for the other nodes to listen."""
_CONNECT_S = 5.0
_POLL_S = 0.05


class PortRange(Protocol):
    """The ports of the profile."""

    @property
    def first_port(self) -> int:
        """Return the first port of the range, which belongs to it."""

    @property
    def last_port(self) -> int:
        """Return the last port of the range, which belongs to it."""


class RunAddresses(msgspec.Struct, frozen=True):
    """Address where a run would listen on each node.

    Attributes
    ----------
    by_node:
        Addresses by Slurm's names.
    problem:
        Reason why they cannot be chosen; empty where they can.
    """

    by_node: dict[str, str] = {}
    problem: str = ""

    @classmethod
    def ask(cls, interface: str | None) -> RunAddresses:
        """Ask all nodes of the job that we are the batch process of."""
        hosts = expand_hostlist(os.environ["SLURM_JOB_NODELIST"])
        command = ["srun", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1", "--overlap"]
        command += ["--export=ALL", sys.executable, "-P", "-m", "hpcrl.supervisor.launch.node_answers"]
        known = {host: host for host in hosts}
        with contextlib.suppress(SlurmError):  # nodes of a site may have no scontrol: names are resolved there
            known |= {node.name: node.address for node in SlurmClient().nodes(hosts)}
        try:
            with Survey([(command, hosts)], env=step_environment(os.environ), timeout_s=_ASK_S) as survey:
                interfaces = dict.fromkeys(hosts, interface)
                return cls(choose_addresses(survey, interfaces=interfaces, known=known, others={}))
        except HpcrlError as error:
            return cls(problem=str(error).split("\n", 1)[0])

    def to_env(self) -> dict[str, str]:
        """Give the variables by which the step that follows learns of it."""
        return {_VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_env(cls) -> RunAddresses:
        """Return the addresses that the batch process has found."""
        return msgspec.json.decode(os.environ[_VARIABLE], type=prepared(cls))


def check_connectivity(directory: Path, host: str, ports: PortRange, addresses: Mapping[str, str]) -> dict[str, str]:
    """Listen, and connect to all other nodes; returns why, by the name of each that was not reached.

    Blocks until all have met, for a minute at most.
    """
    others = {node: address for node, address in addresses.items() if node != host}
    try:
        (port,) = choose_ports(1, first=ports.first_port, last=ports.last_port, host=addresses[host])
        family = socket.AF_INET6 if ":" in addresses[host] else socket.AF_INET
        listener = socket.create_server((addresses[host], port), family=family)
    except (HpcrlError, OSError) as error:
        what = f"cannot listen on {addresses[host]}: {error}".split("\n", 1)[0]
        atomic_write(directory / f"listens-{host}", what.encode())
        atomic_write(directory / f"met-{host}", b"")
        return dict.fromkeys(others, f"{host} {what}")
    with listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        atomic_write(directory / f"listens-{host}", str(port).encode())
        deadline = time.monotonic() + _MEET_S
        unreached = {node: _connect(directory, node, address, deadline) for node, address in others.items()}
        atomic_write(directory / f"met-{host}", b"")
        # nodes that connect late must find this listener
        while time.monotonic() < deadline and not {f"met-{node}" for node in others} <= set(os.listdir(directory)):
            time.sleep(_POLL_S)
    return {node: why for node, why in unreached.items() if why}


def _accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the socket was closed
        while True:
            listener.accept()[0].close()


def _connect(directory: Path, node: str, address: str, deadline: float) -> str:
    """Return the reason why a node cannot be reached; empty where it can."""
    name = f"listens-{node}"
    while name not in os.listdir(directory):
        if time.monotonic() > deadline:
            return f"it did not listen on {address} in time"
        time.sleep(_POLL_S)
    said = (directory / name).read_text()
    if not said.isdecimal():
        return f"{node} {said}"
    port = int(said)
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"no connection to {address}:{port}: {error}"
    return ""
