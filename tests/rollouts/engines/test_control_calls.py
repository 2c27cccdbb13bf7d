"""Control calls to servers that hang up when they should not."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from hpcrl.rollouts.engines.client import EngineClient, EngineError

REFUSAL = b'{"error": "it is torn"}'


async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer 500 and hang up, as vLLM's server does after an exception; only who asks for it is told before."""
    asked = await read_request(reader)
    told = "connection: close\r\n" if "\r\nconnection: close\r\n" in asked else ""
    head = f"HTTP/1.1 500 Internal Server Error\r\ncontent-length: {len(REFUSAL)}\r\n{told}\r\n"
    writer.write(head.encode() + REFUSAL)
    await writer.drain()
    if not told:
        await read_request(reader)
    writer.close()


async def read_request(reader: asyncio.StreamReader) -> str:
    """Head of the next request; empty where none comes."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    except asyncio.IncompleteReadError:
        return ""
    await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
    return head


async def test_a_refusal_is_not_the_loss_of_the_engine() -> None:
    """After an update that fails, requests are to go on: the next call must not fail by the connection of the last."""
    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, aiohttp.ClientSession() as session:
        client = EngineClient(session, name="engine-0", url=f"http://{host}:{port}")
        for _ in range(3):
            with pytest.raises(EngineError, match="answered 500") as caught:
                await client.control("/update_weights", timeout_s=10.0)
            assert not caught.value.unreachable
