"""Free TCP ports on this machine."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection, Sequence

from hpcrl.errors import HpcrlError

_SLOT = 16
"""Neighbouring ports that share one hold: a run with a thousand ports needs some sixty open files for them."""


class HeldPorts:
    """Ports of this machine that other runs do not choose, from their choice until after a server listens.

    A router binds its port when its engines are ready, minutes after it was chosen: another run could choose it
    meanwhile. Ports are held by names in Linux's abstract socket namespace: all users of the machine see them (of the
    network namespace, as with ports), and they end with the process, however it ends. Of two threads that choose the
    same port at once, one may be refused.
    """

    def __init__(self) -> None:
        self._slots: dict[int, socket.socket] = {}

    def hold(self, port: int) -> bool:
        """Hold a port, with its neighbours; False where another holder has it."""
        slot = port // _SLOT
        if slot in self._slots:
            return True
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0hpcrl-ports-{slot}")
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._slots[slot] = name
        return True

    def release(self) -> None:
        """Release all of them, as happens when this object is garbage-collected."""
        for name in self._slots.values():
            name.close()
        self._slots.clear()

    def __del__(self) -> None:
        self.release()


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on ``host`` and ``port`` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as servers do: a port that only waits for old packets (TIME_WAIT) counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def choose_ports(count: int, *, first: int, last: int, host: str, start: int | None = None) -> list[int]:
    """Choose ``count`` different free ports of ``first`` to ``last``.

    Two runs that start at once could choose the same port between this test and their ``bind``: the search
    begins at a random port, which makes that unlikely, and the loser fails with the port in its message.

    Parameters
    ----------
    count:
        Number of ports.
    first, last:
        The range, both included.
    host:
        Address that the servers will listen on.
    start:
        First port that is tried; random by default.

    Raises
    ------
    HpcrlError
        The range has not that many free ports.
    """
    size = last - first + 1
    offset = random.randrange(size) if start is None else start - first
    ports: list[int] = []
    for step in range(size):
        if len(ports) == count:
            break
        port = first + (offset + step) % size
        if is_free(host, port):
            ports.append(port)
    if len(ports) < count:
        raise HpcrlError(
            f"only {len(ports)} of {count} ports are free on {host} between {first} and {last}\n"
            "    hint: widen ports.first and ports.last in the cluster profile, or end the processes that listen there"
        )
    return ports


def choose_blocks(
    sizes: Sequence[int],
    *,
    first: int,
    last: int,
    host: str,
    start: int | None = None,
    taken: Collection[int] = (),
    held: HeldPorts | None = None,
) -> list[int]:
    """Choose blocks of neighbouring free ports that do not meet; returns the first port of each.

    Parameters
    ----------
    sizes:
        Ports of each block.
    first, last, host, start:
        See `choose_ports`.
    taken:
        Ports that are reserved even if no process listens there now.
    held:
        Holder of the chosen ports; ports held by others are skipped.

    Raises
    ------
    HpcrlError
        The range has no place for all of them.
    """
    size = last - first + 1
    offset = random.randrange(size) if start is None else start - first
    used = set(taken)

    def is_ours(port: int) -> bool:
        return port not in used and is_free(host, port) and (held is None or held.hold(port))

    blocks: list[int] = []
    # from the search's beginning to the end of the range, then from the start of the range: no block wraps
    ports = [*range(first + offset, last + 1), *range(first, first + offset)]
    position = 0
    for wanted in sizes:
        run: list[int] = []
        while len(run) < wanted and position < len(ports):
            port = ports[position]
            position += 1
            if run and port != run[-1] + 1:
                run = []
            run = [*run, port] if is_ours(port) else []
        if len(run) < wanted:
            raise HpcrlError(
                f"there are no {wanted} neighbouring free ports on {host} between {first} and {last} for the last of "
                f"{len(blocks) + 1} servers\n"
                "    hint: widen ports.first and ports.last in the cluster profile, or end another run, or"
                " the processes that listen there"
            )
        used.update(run)
        blocks.append(run[0])
    return blocks
