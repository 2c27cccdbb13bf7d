"""Limits for strangers' connections to vLLM's HTTP server, which is uvicorn.

uvicorn has no deadline for the head of a first request and no limit for connections that send none, and its settings
are not among vLLM's flags. So the protocol classes of this process report their connections to
`hpcrl.network.connection_limits`, as hpcrl's own servers do (`hpcrl.network.http_server`).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from hpcrl.network.connection_limits import PendingConnections
from hpcrl.reporting.log_limits import limit_logger

_PROTOCOLS = (
    ("uvicorn.protocols.http.httptools_impl", "HttpToolsProtocol"),
    ("uvicorn.protocols.http.h11_impl", "H11Protocol"),
)

_limited: dict[type, PendingConnections] = {}
"""Limits by protocol class. A class is changed once; a later call replaces the object that it reports to."""


def limit_uvicorn(pending: PendingConnections) -> list[str]:
    """Limit the connections that uvicorn's servers of this process accept from now on.

    A connection is known to ``pending`` by the address and port of its client, which ASGI calls ``client``.

    Returns
    -------
    list[str]
        Names of the protocol classes that were found. None of them means that uvicorn is not installed.
    """
    limit_logger("uvicorn.error")
    limit_logger("asyncio")
    found = []
    for module, name in _PROTOCOLS:
        try:
            protocol = getattr(importlib.import_module(module), name)
        except ImportError:  # uvicorn defines the class only if its parser is installed
            continue
        if protocol not in _limited:
            _report(protocol)
        _limited[protocol] = pending
        found.append(name)
    return found


def _report(protocol: Any) -> None:
    """Let one class report its connections; those that it made before stay as they are."""
    made, lost = protocol.connection_made, protocol.connection_lost

    @functools.wraps(made)
    def connection_made(self: Any, transport: Any) -> None:
        made(self, transport)
        if self.client is not None:
            _limited[protocol].opened(tuple(self.client), str(self.client[0]), transport.abort)

    @functools.wraps(lost)
    def connection_lost(self: Any, exc: Exception | None) -> None:
        if self.client is not None:
            _limited[protocol].lost(tuple(self.client))
        lost(self, exc)

    protocol.connection_made, protocol.connection_lost = connection_made, connection_lost
