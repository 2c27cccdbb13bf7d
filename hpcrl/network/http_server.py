"""The common way in which hpcrl's HTTP servers listen and end.

Every client is a stranger until a request brings the run's token (`hpcrl.network.auth`). What a stranger can do
before that is bounded here: time and number of connections (`hpcrl.network.connection_limits`), and what is logged
(`hpcrl.reporting.log_limits`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from hpcrl.network.connection_limits import PendingConnections
from hpcrl.reporting.log_limits import limit_logger

if TYPE_CHECKING:
    from aiohttp import web

_TURNS = 3
"""Turns of the event loop from an accepted socket to a connection that its server knows."""
_KERNEL_BACKLOG = 1024
"""Connections that the kernel keeps for a server until it accepts them."""


def make_runner(
    app: web.Application, *, handler_cancellation: bool = False, shutdown_timeout: float = 60.0
) -> web.AppRunner:
    """Prepare a server of ``app``, whose errors are logged at a bounded rate.

    Parameters
    ----------
    handler_cancellation:
        Cancel the handler of a client that went away.
    shutdown_timeout:
        Seconds that running handlers have when the server ends.
    """
    from aiohttp import web  # noqa: PLC0415 - callers of `hpcrl.network.http_server` may not serve

    _answer_odd_expectations()
    limit_logger(__name__)
    # asyncio logs each failed accept() with its traceback, 128 times per turn if descriptors run out
    limit_logger("asyncio")
    return web.AppRunner(
        app,
        access_log=None,
        logger=logging.getLogger(__name__),
        handler_cancellation=handler_cancellation,
        shutdown_timeout=shutdown_timeout,
    )


def _answer_odd_expectations() -> None:
    """Let aiohttp refuse any ``Expect`` header (idempotent).

    It answers before middlewares see a request, also for unknown paths, and repeats what the header contains: for
    bytes that are not UTF-8 it raises an error of the server, with its traceback. Routes and applications have no
    setting that reaches all paths.
    """
    from aiohttp import web, web_urldispatcher  # noqa: PLC0415 - callers of `hpcrl.network.http_server` may not serve

    class _ExpectationFailed(web.HTTPExpectationFailed):
        def __init__(self, **settings: Any) -> None:
            super().__init__(text="the server does not support this Expect header")

    web_urldispatcher.HTTPExpectationFailed = _ExpectationFailed  # type: ignore[attr-defined]


async def listen(runner: web.AppRunner, pending: PendingConnections, at: socket.socket | tuple[str, int]) -> int:
    """Serve on a socket, or on a host and port (0 for a free port).

    Parameters
    ----------
    runner:
        Runner from `make_runner`, after ``setup()``.
    pending:
        Limits connections that were not admitted. The code that answers requests admits them:
        `hpcrl.network.auth.Gate`.

    Returns
    -------
    int
        The port.

    Raises
    ------
    OSError
        The address cannot be bound.
    """
    listener = at if isinstance(at, socket.socket) else _bind(*at)
    try:
        site = _site(runner, pending, listener)
        await site.start()
    except BaseException:
        listener.close()
        raise
    listener.listen(_KERNEL_BACKLOG)
    return int(listener.getsockname()[1])


def _bind(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = found[0]
    return socket.create_server(address[:2], family=family, backlog=_KERNEL_BACKLOG)


def _site(runner: web.AppRunner, pending: PendingConnections, listener: socket.socket) -> web.BaseSite:
    from aiohttp import web  # noqa: PLC0415

    class LimitedSite(web.SockSite):
        async def start(self) -> None:
            await web.BaseSite.start(self)
            make = cast("Callable[[], asyncio.Protocol]", runner.server)
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _LimitedProtocol(make(), pending), sock=listener, backlog=pending.backlog
            )

    return LimitedSite(runner, listener)


class _LimitedProtocol(asyncio.Protocol):
    """Forwards everything to the protocol of the HTTP library, and reports when connections open and close."""

    def __init__(self, inner: asyncio.Protocol, pending: PendingConnections) -> None:
        self._inner, self._pending = inner, pending
        self.data_received = inner.data_received  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer: Any = transport.get_extra_info("peername")
        self._pending.opened(transport, str(peer[0]) if peer else "", self._transport.abort)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pending.lost(self._transport)
        self._inner.connection_lost(exc)


async def stop_serving(runner: web.AppRunner) -> None:
    """Stop listening, and end all connections.

    ``cleanup`` alone leaves one open that was accepted just before it: asyncio (3.11) cannot make a connection of a
    server that is closed, and forgets the socket.
    """
    loop = asyncio.get_running_loop()
    for site in runner.sites:
        for listener in site._server.sockets if isinstance(site._server, asyncio.Server) else ():
            loop.remove_reader(listener.fileno())
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    await runner.cleanup()
