"""How HTTP servers of ours end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["stop_serving"]

_TURNS = 3
"""Of the event loop, from an accepted socket to a connection that its server knows."""


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
