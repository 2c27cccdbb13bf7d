"""Free TCP ports for a virtual cluster."""

from __future__ import annotations

import contextlib
import random
import socket

from hpcrl.devcluster.settings import Ports
from hpcrl.errors import UsageError

_FIRST, _LAST = 10000, 19999
"""Below what cluster profiles give to roles (20000 on), and below the kernel's ephemeral ports."""
_TRIES = 50


def choose_cluster_ports(nodes: int, *, accounting: bool) -> Ports:
    """Return a block of ports that are free now.

    The first port is random, so that clusters that start at the same time rarely choose the same block. If they do, a
    daemon of one cannot bind, and its start reports that.

    Raises
    ------
    UsageError
        No block was found.
    """
    needed = nodes + 2
    for _ in range(_TRIES):
        first = random.randint(_FIRST, _LAST - needed)
        if _all_free(range(first, first + needed)):
            return Ports(controller=first, database=first + 1 if accounting else 0, first_node=first + 2)
    raise UsageError(
        f"no {needed} free TCP ports in a row between {_FIRST} and {_LAST}\n"
        "    hint: end a virtual cluster that is not needed: hpcrl devcluster ls"
    )


def _all_free(ports: range) -> bool:
    with contextlib.ExitStack() as stack:
        for port in ports:
            probe = stack.enter_context(socket.socket())
            # as the daemons do: a port whose connections linger in TIME_WAIT is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True


def is_listening(port: int) -> bool:
    """Return whether a server accepts connections on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
