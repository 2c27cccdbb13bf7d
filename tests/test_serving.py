"""A server that ends leaves no connection open, whenever that was made."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from aiohttp import web

from hpcrl.network.http_server import stop_serving


async def test_a_connection_that_was_accepted_just_now_is_ended_too() -> None:
    loop, busy = asyncio.get_running_loop(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        busy.set()
        await asyncio.sleep(60.0)
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/", slow)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    address = site._server.sockets[0].getsockname()
    with contextlib.ExitStack() as stack:
        old, new = (stack.enter_context(socket.socket()) for _ in range(2))
        old.setblocking(False)
        await loop.sock_connect(old, address)
        await loop.sock_sendall(old, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await busy.wait()  # a request in flight: the end takes a moment
        new.connect(address)
        new.setblocking(False)
        for _ in range(2):  # it is accepted in the second turn, and the server knows it two turns later
            await asyncio.sleep(0)
        await stop_serving(runner)
        assert await asyncio.wait_for(loop.sock_recv(new, 1), 60.0) == b""
        assert await asyncio.wait_for(loop.sock_recv(old, 1), 60.0) == b""
