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


CALLS = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/collective_rpc", "/pause?mode=keep", "/resume", "/abort_requests", "/update_weight_version"),
)


@pytest.mark.parametrize("path", CALLS)
async def test_a_refusal_is_not_the_loss_of_the_engine(path: str) -> None:
    """After a call that fails, requests are to go on: the next call must not fail by the connection of the last."""
    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, aiohttp.ClientSession() as session:
        client = EngineClient(session, name="engine-0", url=f"http://{host}:{port}")
        for _ in range(3):
            with pytest.raises(EngineError, match="answered 500") as caught:
                await client.control(path, timeout_s=10.0)
            assert not caught.value.unreachable


async def test_a_call_after_a_request_that_failed_has_another_connection() -> None:
    """The server may also have hung up after a request for tokens, which are sent on connections that stay."""
    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, aiohttp.ClientSession() as session:
        client = EngineClient(session, name="engine-0", url=f"http://{host}:{port}")
        async with session.post(f"{client.url}/inference/v1/generate", data=b"{}") as answer:
            await answer.read()
        for call in (
            client.control("/start_weight_update", timeout_s=10.0),
            client.prompt_logprobs([1, 2], cache_salt="canary", timeout_s=10.0),
        ):
            with pytest.raises(EngineError, match="answered 500") as caught:
                await call
            assert not caught.value.unreachable
