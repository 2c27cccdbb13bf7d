"""``python -m hpcrl.dock.warehouse.server``: serves the files of a warehouse to ranks on other nodes.

It holds nothing itself: where it is killed, nothing is lost, and another one serves the same files. It says its port in
one line of its output, and ends when its input does, which is when the process ends that has started it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import sys
from pathlib import Path

import msgspec

from hpcrl.dock.warehouse.frames import HEAD, LONGEST, Answer, Request, frame
from hpcrl.errors import HpcrlError
from hpcrl.network.auth import Gate
from hpcrl.network.connection_limits import raise_descriptor_limit
from hpcrl.network.credentials import Credentials, read_token
from hpcrl.processes.daemon_threads import run_process
from hpcrl.reporting.log_limits import limit_logger
from hpcrl.storage.msgspec_types import decode_msgpack
from hpcrl.storage.shm_directories import remove_dead
from hpcrl.storage.trusted_paths import check_private, open_trusted

_KEY = re.compile(r"\d{6,}-\d{6,}\.columns\.\d+")
_IDLE_S = 600.0
"""A connection on which nothing is asked for so long is closed; one without a first request is closed sooner."""
_SEND_S = 600.0
"""The longest that a reader may take for one block."""


class WarehouseServer:
    """Answers requests for blocks in a directory."""

    def __init__(self, directory: Path, gate: Gate) -> None:
        """Prepare (OSError where the directory is not ours alone)."""
        check_private(directory)
        self._directory, self._gate = directory, gate

    async def start(self, host: str, port: int) -> tuple[asyncio.Server, int]:
        """Listen on a port of ``host``, 0 for a free one (OSError, UsageError where it may not)."""
        self._gate.check_host(host)
        limit_logger("asyncio")
        server = await asyncio.start_server(self._serve, host, port, backlog=self._gate.pending.backlog)
        return server, int(server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError)
        peer = writer.get_extra_info("peername")
        self._gate.pending.opened(writer, str(peer[0]) if peer else "", writer.transport.abort)
        try:
            with contextlib.suppress(*ended):
                while await self._answer(reader, writer):
                    pass
        finally:
            self._gate.pending.lost(writer)
        writer.close()
        with contextlib.suppress(*ended):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return False where the connection ends with it."""
        async with asyncio.timeout(_IDLE_S):
            (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
            if length > LONGEST:
                writer.write(frame(Answer(400, "the request is too long")))
                return False
            data = await reader.readexactly(length)
        try:
            request = decode_msgpack(data, Request)
        except msgspec.DecodeError as error:
            writer.write(frame(Answer(400, f"the request cannot be read: {error}")))
            return False
        peer = writer.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        refusal = self._gate.refusal("GET", f"/{request.key}", request.authorization, address, connection=writer)
        if refusal is not None:
            writer.write(frame(Answer(refusal.status, refusal.message)))
            return False
        async with asyncio.timeout(_SEND_S):
            return await self._send(request, writer)

    async def _send(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if not _KEY.fullmatch(request.key) or request.offset < 0 or request.length <= 0:
            writer.write(frame(Answer(400, "no block can have this name, or these bytes")))
            return False
        try:
            fd = open_trusted(self._directory / request.key)
        except OSError as error:
            writer.write(frame(Answer(404, f"the block is not here: {error.strerror or error}")))
            await writer.drain()
            return True
        with os.fdopen(fd, "rb") as file:
            if os.fstat(fd).st_size < request.offset + request.length:
                writer.write(frame(Answer(404, "the block ends before these bytes")))
            else:
                writer.write(frame(Answer(200)))
                await writer.drain()
                loop = asyncio.get_running_loop()
                await loop.sendfile(writer.transport, file, request.offset, request.length)
        await writer.drain()
        return True


async def _run(directory: Path, host: str, port: int, gate: Gate) -> None:
    server, port = await WarehouseServer(directory, gate).start(host, port)
    print(port, flush=True)
    parent = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(parent), sys.stdin)
    await parent.read()
    server.close()
    # the process that started this one may have been killed
    remove_dead(directory.parent)


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(description="serve the blocks of a warehouse of rollouts")
    parser.add_argument("--directory", type=Path, required=True, help="directory of the blocks")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--token-file", type=Path, help="file with the token of the run")
    parser.add_argument("--attempt", type=int, help="attempt of the run whose requests are answered")
    given = parser.parse_args()
    raise_descriptor_limit()
    try:
        token = None if given.token_file is None else Credentials(read_token(given.token_file), given.attempt)
        run_process(_run(given.directory, given.host, given.port, Gate("warehouse", token)))
    except (HpcrlError, OSError) as error:
        raise SystemExit(f"error: the warehouse of rollouts cannot be served: {error}") from None


if __name__ == "__main__":
    main()
