"""Unix sockets that lead to addresses, for sandboxes without a network."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

_CHUNK = 1 << 16
_MAX_CONNECTIONS = 128
"""Maximum number of connections of one sandbox at once; more are closed at once."""
_CONNECT_S = 10.0
_BACKLOG = 64


@contextlib.asynccontextmanager
async def forwarded(directory: Path, addresses: Mapping[str, tuple[str, int]]) -> AsyncIterator[None]:
    """Serve unix sockets in a directory inside the context; all connections end with it.

    Parameters
    ----------
    addresses:
        Host and port of each socket, by its file name. Nothing else can be reached by them.

    Raises
    ------
    OSError
        A socket cannot be made.
    """
    async with contextlib.AsyncExitStack() as stack:
        joined: set[asyncio.Task[None]] = set()
        stack.push_async_callback(_end, joined)
        for name, (host, port) in addresses.items():
            path = directory / name
            take = partial(_take, host, port, joined)
            server = await asyncio.start_unix_server(take, path, limit=_CHUNK, backlog=_BACKLOG)
            stack.callback(server.close)
            # the sandbox has a user of its own
            os.chmod(path, 0o666)
        yield


def _take(
    host: str,
    port: int,
    joined: set[asyncio.Task[None]],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    if len(joined) >= _MAX_CONNECTIONS:
        writer.close()
        return
    task = asyncio.get_running_loop().create_task(_join(host, port, reader, writer))
    joined.add(task)
    task.add_done_callback(joined.discard)


async def _join(host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Join a connection with a new one to an address, until both sides or one of them with an error have ended."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            other_reader, other_writer = await asyncio.open_connection(host, port, limit=_CHUNK)
    except (OSError, TimeoutError):
        writer.close()
        return
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, other_writer))
            group.create_task(_pump(other_reader, writer))
    except* OSError:
        pass
    finally:
        writer.close()
        other_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _end(joined: set[asyncio.Task[None]]) -> None:
    for task in joined:
        task.cancel()
    await asyncio.gather(*joined, return_exceptions=True)
