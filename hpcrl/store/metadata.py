"""Metadata server of the KV pool, through which Mooncake's clients exchange the addresses of their memory.

Mooncake's master has one of its own, which listens on all addresses of the node whatever its setting is
(``--http_metadata_server_host`` of 0.3.13). This one speaks the same three calls, ``GET``, ``PUT`` and ``DELETE`` of
``/metadata?key=…``, and listens on the address of the run. Like that one it forgets all when it ends.

Mooncake's clients send no token, so every caller that reaches the address is answered. Therefore all resources of one
caller are bounded: memory, connections, time.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from hpcrl.network.connection_limits import PendingConnections
from hpcrl.network.http_server import listen, make_runner, stop_serving
from hpcrl.processes.daemon_threads import run_process

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler

_MAX_VALUE_BYTES = 16 << 20
"""Maximum size of one value in bytes: a segment's description with all of its buffers is some KiB."""
_MAX_TOTAL_BYTES = 512 << 20
"""Maximum size of all keys and values in bytes."""
_MAX_KEY_CHARACTERS = 1024
_MAX_BODIES = 8
"""Maximum number of bodies that are read at a time."""
_REQUEST_S = 30.0
"""Maximum time for one request, its body included, in seconds."""
_IDLE_S = 30.0
"""Maximum time that a connection may stay without a request, in seconds. Clients connect again."""
_START_S = 30.0


class MetadataServer:
    """Server that runs in a thread until it is closed.

    Parameters
    ----------
    host, port:
        The only address on which it listens.

    Raises
    ------
    OSError
        It cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = _Server()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(host, port), name="metadata", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_S):
            raise OSError(f"the metadata server did not listen on {host}:{port} within {_START_S:.0f} s")
        if self._failures:
            self._thread.join()
            raise self._failures[0]

    @property
    def port(self) -> int:
        """Return the port on which it listens."""
        return self._server.server_address[1]

    def close(self) -> None:
        """Stop listening."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, host: str, port: int) -> None:
        try:
            run_process(self._serve(host, port))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that starts us
            self._failures.append(error)
        finally:
            self._started.set()

    async def _serve(self, host: str, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        runner = make_runner(self._server.app(), shutdown_timeout=1.0)
        await runner.setup()
        try:
            self._server.server_address = (host, await listen(runner, self._server.idle, (host, port)))
            self._started.set()
            await self._stop.wait()
        finally:
            await stop_serving(runner)


class _Server:
    """Directory of the clients of one pool."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.server_address = ("", 0)
        self.idle = PendingConnections(deadline_s=_IDLE_S)
        self._bytes = 0
        self._bodies = asyncio.Semaphore(_MAX_BODIES)

    def app(self) -> web.Application:
        """Make the application."""
        from aiohttp import web  # noqa: PLC0415 - clients of the store do not serve

        @web.middleware
        async def bound(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._bound(request, handler)

        app = web.Application(middlewares=[bound], client_max_size=_MAX_VALUE_BYTES)
        app.add_routes(
            [web.get("/metadata", self._get), web.put("/metadata", self._put), web.delete("/metadata", self._delete)]
        )
        return app

    async def _bound(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Bound the time of a request; its connection counts as idle before and after it."""
        from aiohttp import web  # noqa: PLC0415

        connection = request.transport
        self.idle.admitted(connection)
        try:
            async with asyncio.timeout(_REQUEST_S):
                return await handler(request)
        except TimeoutError:
            answer = web.Response(status=408, text="the request took too long")
            answer.force_close()
            return answer
        finally:
            if connection is not None and not connection.is_closing():
                self.idle.opened(connection, request.remote or "", connection.abort)

    async def _get(self, request: web.Request) -> web.Response:
        value = self.values.get(_key(request))
        return _answer(404, b"metadata not found") if value is None else _answer(200, value)

    async def _put(self, request: web.Request) -> web.Response:
        from aiohttp import web  # noqa: PLC0415

        key, length = _key(request), request.content_length or 0
        if length > _MAX_VALUE_BYTES:
            raise web.HTTPRequestEntityTooLarge(max_size=_MAX_VALUE_BYTES, actual_size=length)
        async with self._bodies:
            value = await request.read()
        total = self._bytes + len(key) + len(value) - self._size(key)
        if total > _MAX_TOTAL_BYTES:
            return _answer(507, b"the metadata of the pool is full")
        # a client that was restarted on the same address registers itself again
        self.values[key], self._bytes = value, total
        return _answer(200, b"metadata updated")

    async def _delete(self, request: web.Request) -> web.Response:
        key = _key(request)
        self._bytes -= self._size(key)
        known = self.values.pop(key, None) is not None
        return _answer(200, b"metadata deleted") if known else _answer(404, b"metadata not found")

    def _size(self, key: str) -> int:
        value = self.values.get(key)
        return 0 if value is None else len(key) + len(value)


def _key(request: web.Request) -> str:
    """Return the key that is asked about; 400 where there is none."""
    from aiohttp import web  # noqa: PLC0415

    keys = request.query.getall("key", [])
    if len(keys) != 1 or len(keys[0]) > _MAX_KEY_CHARACTERS:
        raise web.HTTPBadRequest(text="metadata key is required")
    return keys[0]


def _answer(status: int, body: bytes) -> web.Response:
    from aiohttp import web  # noqa: PLC0415

    return web.Response(status=status, body=body, content_type="application/json")
