"""Limits for connections that have not proved that they belong to the run.

A stranger can open connections and send nothing, or half a request. Each costs a file descriptor, and a server without
descriptors answers no request. So a connection has a deadline until its first request is admitted, and the number of
such connections is limited well below the limit of descriptors. A connection whose request was admitted is not limited.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Hashable
from typing import NamedTuple

_DEADLINE_S = 15.0
"""Maximum time from an accepted connection to its first admitted request, in seconds."""
_MAX_PENDING = 4096
_MIN_PENDING = 32
_DESCRIPTOR_SHARE = 4
"""Pending connections take at most one in this many descriptors."""
_MAX_DESCRIPTORS = 1 << 16
_MAX_BACKLOG = 128


class _Connection(NamedTuple):
    address: str
    abort: Callable[[], None]
    deadline: asyncio.TimerHandle


class PendingConnections:
    """The connections of one server that wait to be admitted. Used from the thread of its event loop alone.

    Parameters
    ----------
    limit:
        Maximum number of them. None: a share of the process's limit of descriptors.
    deadline_s:
        Maximum time that one may wait, in seconds.

    Attributes
    ----------
    aborted:
        Connections that were closed by a deadline or the limit so far.
    """

    def __init__(self, limit: int | None = None, deadline_s: float = _DEADLINE_S) -> None:
        self.limit = _default_limit() if limit is None else limit
        self._deadline_s = deadline_s
        # by address, each in the order in which they came
        self._waiting: dict[str, dict[Hashable, _Connection]] = {}
        self._addresses: dict[Hashable, str] = {}
        self.aborted = 0

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def backlog(self) -> int:
        """Return the connections that the server may accept in one turn of its event loop.

        asyncio reads of a connection three turns after it accepted it. Three turns of accepting stay below the limit,
        so that no connection is closed for newer ones before the request that came with it was read.
        """
        return max(1, min(_MAX_BACKLOG, self.limit // 4))

    def opened(self, key: Hashable, address: str, abort: Callable[[], None]) -> None:
        """Register a connection.

        At the limit, the oldest connection of the address with the most of them is closed: a client that sends its
        request at once is served, and a flood from one address does not affect other addresses.

        Parameters
        ----------
        key:
            Identifies the connection among those of the server.
        address:
            Address of the peer.
        abort:
            Closes the connection at once. `lost` must follow from it, or may be missing.
        """
        if len(self._addresses) >= self.limit:
            busiest = max(self._waiting.values(), key=len)
            self._abort(next(iter(busiest)))
        deadline = asyncio.get_running_loop().call_later(self._deadline_s, self._abort, key)
        self._waiting.setdefault(address, {})[key] = _Connection(address, abort, deadline)
        self._addresses[key] = address

    def admitted(self, key: Hashable) -> None:
        """Forget a connection: its request is answered, or it ended (no effect on unknown ones)."""
        address = self._addresses.pop(key, None)
        if address is None:
            return
        of_address = self._waiting[address]
        of_address.pop(key).deadline.cancel()
        if not of_address:
            del self._waiting[address]

    lost = admitted

    def _abort(self, key: Hashable) -> None:
        address = self._addresses.get(key)
        if address is not None:
            abort = self._waiting[address][key].abort
            self.admitted(key)
            self.aborted += 1
            abort()


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as the system does, at most 65,536: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _default_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_PENDING
    return max(_MIN_PENDING, min(_MAX_PENDING, soft // _DESCRIPTOR_SHARE))
