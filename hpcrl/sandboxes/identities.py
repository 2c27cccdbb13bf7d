"""User ids under which sandboxes run on a node.

Root must not be one of them: a program with the node's user id 0 may write to ``/proc/sys`` from every user namespace,
because the kernel asks there for the user and not for capabilities. As root each sandbox has an id of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from hpcrl.sandboxes.interface import SandboxStartError

FIRST_UID = 70000
BLOCK = 4096
"""User ids of one daemon, and so the number of its sandboxes at once."""
_MAX_BLOCKS = 64


def uid_block(uid_map: str, number: int) -> range:
    """Return the n-th block of user ids as root.

    Parameters
    ----------
    uid_map:
        Text of ``/proc/self/uid_map``: of a container it may have few ids.

    Raises
    ------
    SandboxStartError
        Root's ids do not reach that far.
    """
    first = FIRST_UID + number * BLOCK
    ranges = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    if any(inside <= first and first + BLOCK <= inside + size for inside, _, size in ranges):
        return range(first, first + BLOCK)
    raise SandboxStartError(
        f"sandboxes never run as root, and root may not become the users {first} to {first + BLOCK - 1} here\n"
        "    hint: start hpcrl as an ordinary user, or in a container with more user ids"
    )


class Identities:
    """Gives each sandbox a user id; None as an ordinary user, whose own id they have."""

    def __init__(self) -> None:
        """Take a block of user ids that no other daemon of the node has.

        Raises
        ------
        SandboxStartError
            There is none.
        """
        self._claim: socket.socket | None = None
        self._free: list[int] | None = None
        if os.geteuid() != 0:
            return
        for number in range(_MAX_BLOCKS):
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            # the kernel gives the name back when the process has ended
            with contextlib.suppress(OSError):
                claim.bind(f"\0hpcrl-sandbox-uids-{number}")
                self._claim = claim
                self._free = list(reversed(uid_block(Path("/proc/self/uid_map").read_text(), number)))
                return
            claim.close()
        raise SandboxStartError(f"{_MAX_BLOCKS} daemons of sandboxes run on this node already")

    def take(self) -> int | None:
        """Return the user id of a new sandbox.

        Raises
        ------
        SandboxStartError
            All are in use.
        """
        if self._free is None:
            return None
        if not self._free:
            raise SandboxStartError(f"{BLOCK} sandboxes run at once, which is the maximum of a daemon")
        return self._free.pop()

    def give_back(self, uid: int | None) -> None:
        """Return an id whose processes have all ended."""
        if self._free is not None and uid is not None:
            self._free.append(uid)

    def close(self) -> None:
        """Give the block up."""
        if self._claim is not None:
            self._claim.close()
