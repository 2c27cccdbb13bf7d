"""A stub of an engine: vLLM's API, deterministic tokens, faults to order. Serves tests and the scale bench.

As a program (``python stub_engine.py --port N --request-s 5``) it serves until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

EOS = 2
FIRST_CHARACTER = 7
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]


def encode(text: str) -> list[int]:
    """Ids of the character tokenizer (`hpcrl.models.tokenizer.write_character_tokenizer`)."""
    return [FIRST_CHARACTER + CHARACTERS.index(character) for character in text]


def decode(token_ids: list[int]) -> str:
    """Text; special tokens become ``|``."""
    return "".join(CHARACTERS[i - FIRST_CHARACTER] if i >= FIRST_CHARACTER else "|" for i in token_ids)


def coin(*parts: object) -> random.Random:
    """A generator that depends on ``parts`` alone."""
    return random.Random(hashlib.sha256(repr(parts).encode()).digest())


def default_answer(token_ids: list[int], seed: int) -> list[int]:
    """Plays the built-in environments: right about half the time, by the seed."""
    turns = [turn for turn in decode(token_ids).split("|") if turn]
    rng = coin("answer", seed)
    if re.fullmatch(r"[\d*+-]+", turns[0]):
        if len(turns) == 1 and rng.random() < 0.6:
            return [*encode(f"run {turns[0]}"), EOS]
        guess = turns[-1] if len(turns) > 1 else str(rng.randint(1, 9999))
        return [*encode(f"answer {guess}"), EOS]
    word = turns[0].split()[-1]
    text = word[::-1] if rng.random() < 0.5 else word[: rng.randint(1, len(word))]
    return [*encode(text), EOS]


class StubEngine:
    """State and faults.

    Attributes
    ----------
    request_s, token_s:
        Waiting time of a request (greedy ones excepted) and of each of its tokens; ``request_s`` may be a function
        of the request's number, from 1, greedy ones not counted.
    fail:
        Requests (greedy ones excepted) that are answered 500 before one works again.
    fail_updates:
        The same for ``/update_weights``.
    update_s:
        Duration of ``/update_weights``.
    """

    def __init__(self, *, answer: Callable[[list[int], int], list[int]] = default_answer) -> None:
        self.answer = answer
        self.request_s: float | Callable[[int], float] = 0.0
        self.token_s = 0.0
        self.fail = self.fail_updates = 0
        self.update_s = 0.0
        self.version = "initial"
        self.unpaused = asyncio.Event()
        self.unpaused.set()
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.started = self.aborted = self.in_flight = self.most_in_flight = 0
        self.keep_requests = True
        self._staged: str | None = None
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        if self.keep_requests:
            self.requests.append({**body, "session": request.headers.get("x-session-id"), "served": self.version})
        greedy = body["sampling_params"]["temperature"] == 0
        self.started += not greedy
        number = self.started
        if self.fail > 0 and not greedy:
            self.fail -= 1
            return web.Response(status=500, text="ordered to fail")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            seconds = self.request_s(number) if callable(self.request_s) else self.request_s
            if seconds and not greedy:
                await asyncio.sleep(seconds)
            return web.Response(body=await self._sample(body), content_type="application/json")
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1

    async def _sample(self, body: dict[str, Any]) -> bytes:
        params = body["sampling_params"]
        seed = 0 if params["temperature"] == 0 else params["seed"]
        token_ids = self.answer(body["token_ids"], seed)[: params["max_tokens"]]
        spans: list[dict[str, Any]] = []
        for position in range(len(token_ids)):
            if self.token_s:
                await asyncio.sleep(self.token_s)
            if not self.unpaused.is_set():
                await self.unpaused.wait()
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": position, "end": position})
            spans[-1]["end"] = position + 1
        choice = {
            "index": 0,
            "token_ids": token_ids,
            "logprobs": {"content": [{"token_id": t, "logprob": -0.25 - t / 1024} for t in token_ids]},
            "finish_reason": "stop" if token_ids[-1] == EOS else "length",
            "weight_versions": spans,
        }
        return msgspec.json.encode({"request_id": "r", "choices": [choice]})

    async def pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep"
        # anything else would take the KV from requests in flight
        assert dict(request.query) == {"mode": "keep", "clear_cache": "false"}
        self.unpaused.clear()
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        self.unpaused.set()
        return web.json_response({"status": "resumed"})

    async def update(self, request: web.Request) -> web.Response:
        if self.fail_updates > 0:
            self.fail_updates -= 1
            return web.Response(status=500, text="ordered to fail")
        await asyncio.sleep(self.update_s)
        self._staged = (await request.json())["update_info"]["path"]
        return web.json_response({})

    async def finish_update(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"]
        assert self._staged is not None
        assert self._staged.endswith(f"v{int(self.version):06d}")
        return web.json_response({})

    async def start(self, port: int = 0) -> None:
        """Serve on a port of our own."""

        def recorded(name: str, handler: Callable[[web.Request], Awaitable[web.Response]]) -> Any:
            async def record(request: web.Request) -> web.Response:
                self.calls.append(name)
                return await handler(request)

            return web.post(f"/{name}", record)

        async def ok(_: web.Request) -> web.Response:
            return web.Response(text="{}", content_type="application/json")

        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", ok),
                web.post("/inference/v1/generate", self.generate),
                recorded("pause", self.pause),
                recorded("resume", self.resume),
                recorded("init_weight_transfer_engine", ok),
                recorded("start_weight_update", ok),
                recorded("update_weights", self.update),
                recorded("finish_weight_update", self.finish_update),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or self.port, backlog=4096)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Go away; connections are cut."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


async def _serve(port: int, request_s: float, spread: float) -> None:
    stub = StubEngine()
    stub.keep_requests = False
    stub.request_s = lambda number: request_s * (1.0 + spread * (coin(number).random() - 0.5))
    await stub.start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--request-s", type=float, default=1.0)
    parser.add_argument("--spread", type=float, default=1.0)
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(arguments.port, arguments.request_s, arguments.spread))
