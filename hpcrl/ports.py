"""Free TCP ports on this machine."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection, Sequence

from hpcrl.errors import HpcrlError

__all__ = ["HeldPorts", "choose_blocks", "choose_ports", "is_free"]

_SLOT = 16
"""Neighbouring ports that are held together: a run of a thousand ports needs some sixty open files for them."""


class HeldPorts:
    """Ports of this machine that other runs do not choose, from their choice until long after somebody listens.

    A router binds its port when its engines are ready, minutes after it was chosen: another run could choose it
    meanwhile. Held are names in Linux's abstract socket namespace: all users of the machine see them (of the network
    namespace, as with ports), and they go with the process, however it ends. Of two threads that ask at once for the
    same port, one may be told that it is held.
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
        """Let others choose all of them, as happens when nobody has this object any more."""
        for name in self._slots.values():
            name.close()
        self._slots.clear()

    def __del__(self) -> None:
        self.release()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as servers do: what only waits for old packets (TIME_WAIT) counts as free
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
        How many.
    first, last:
        The range, both included.
    host:
        Address that the servers will listen on.
    start:
        Where the search begins; random by default.

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
            "    hint: widen ports.first and ports.last in the cluster profile, or end what listens there"
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
        As of `choose_ports`.
    taken:
        Ports that are somebody's, though nobody may listen there now.
    held:
        Who holds what is chosen; ports that others hold are passed over.

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
                "    hint: widen ports.first and ports.last in the cluster profile, or end another run here or"
                " what listens there"
            )
        used.update(run)
        blocks.append(run[0])
    return blocks
