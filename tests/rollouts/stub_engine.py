"""A stub of an engine: vLLM's API, deterministic tokens, faults to order. Serves tests and the scale bench.

As a program (``python stub_engine.py --port N --request-s 5``) it serves until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import io
import random
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from hpcrl.inference.kept_rows import KeptRows
from hpcrl.network.auth import Gate
from hpcrl.network.http_server import stop_serving
from hpcrl.network.routed_experts_reference import FIELD, PATH, RowsReference
from hpcrl.weights.proof import PROVE_WEIGHTS, WeightsProof

EOS = 2
FIRST_CHARACTER = 7
SEVERAL = 4
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


def npy_bytes(array: NDArray[Any]) -> bytes:
    """An array as a file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def npy(array: NDArray[Any]) -> str:
    """An array as engines send it."""
    return base64.b64encode(npy_bytes(array)).decode()


def default_answer(token_ids: list[int], seed: int) -> list[int]:
    """Plays the built-in environments: right about half the time, by the seed."""
    turns = [turn for turn in decode(token_ids).split("|") if turn]
    if not turns:
        return [EOS]  # a probe says nothing
    rng = coin("answer", seed)
    if re.fullmatch(r"[\d*+-]+", turns[0]):
        if len(turns) == 1 and rng.random() < 0.6:
            return [*encode(f"run {turns[0]}"), EOS]
        guess = turns[-1] if len(turns) > 1 else str(rng.randint(1, 9999))
        return [*encode(f"answer {guess}"), EOS]
    word = turns[0].split()[-1]
    text = word[::-1] if rng.random() < 0.5 else word[: rng.randint(1, len(word))]
    return [*encode(text), EOS]


def several_turns(token_ids: list[int], seed: int) -> list[int]:
    """Plays the calculator in `SEVERAL` turns: calls of the tool, and an answer. Else as `default_answer`."""
    said = [turn for turn in decode(token_ids).split("|") if turn]
    if not said or not re.fullmatch(r"[\d*+-]+", said[0]):
        return default_answer(token_ids, seed)
    number = (len(said) - 1) // 2
    text = f"run {seed % 1000}+{number}" if number < SEVERAL - 1 else f"answer {said[-1]}"
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
    skip:
        A version that cannot be loaded: it goes on with the one that it has, and says so.
    torn:
        The same for every version from now on.
    update_s, exchange_s:
        How long reading a version takes, and exchanging it, for which requests are frozen.
    reads:
        Cleared, the version that it was asked to load is not read before this is set.
    in_place:
        Whether weights are loaded in place, as by vLLM: what was read is asked for, and loaded while requests are
        frozen.
    slots:
        Requests that it says it can run at once, with KV for just as many; those above wait, by its metrics alone.
    cut_short:
        Whether answers in parts end, as whole ones do, before their last part.
    hung:
        Requests are taken and nothing is sampled; all else is answered.
    slow_pause:
        Whether a pause is answered only when it is over, as by a vLLM whose KV nobody fetches.
    experts:
        Gives a row of experts for each token of a sequence; None where it says nothing about them.
    experts_in_parts:
        Whether rows come with the tokens of parts, or all with the end.
    rows:
        Where rows stay of requests that say that they fetch them; None: it does not know of that.
    said_port:
        Where its answers say that rows are; None: here.
    gate:
        Lets in who brings the run's token; None: everybody.
    wrong_weights:
        Whether it computes with other weights than it was asked to load.
    awake:
        Cleared, the engine answers nothing at all, as a process that a signal has stopped.
    begun:
        Requests that have some of their tokens, and not yet all.
    """

    def __init__(self, *, answer: Callable[[list[int], int], list[int]] = default_answer) -> None:
        self.answer = answer
        self.request_s: float | Callable[[int], float] = 0.0
        self.token_s = 0.0
        self.fail = self.fail_updates = 0
        self.skip: int | None = None
        self.torn = False
        self.update_s = self.exchange_s = 0.0
        self.reads = asyncio.Event()
        self.reads.set()
        self.in_place = False
        self.slots = 1 << 20
        self.hung = False
        self.cut_short = False
        self.slow_pause = False
        self.experts: Callable[[list[int]], NDArray[Any]] | None = None
        self.experts_in_parts = True
        self.rows: KeptRows | None = None
        self.said_port: int | None = None
        self.wrong_weights = False
        self.version = "initial"
        self.gate: Gate | None = None
        self.awake = asyncio.Event()
        self.awake.set()
        self.unpaused = asyncio.Event()
        self.unpaused.set()
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.sampled = self.started = self.aborted = self.in_flight = self.most_in_flight = self.begun = 0
        self.keep_requests = True
        self._staged: str | None = None
        self._staged_s = 0.0
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def generate(self, request: web.Request) -> web.StreamResponse:
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
            if body.get("stream"):
                return await self._stream(request, body)
            return web.Response(body=await self._sample(body), content_type="application/json")
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1

    async def _sample(self, body: dict[str, Any]) -> bytes:
        async for choice in self._parts(body, interval=1 << 30):
            last = choice
        return msgspec.json.encode({"request_id": "r", "choices": [last]})

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Server-sent events: the first token, and then every ``stream_interval``."""
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        async for choice in self._parts(body, body["sampling_params"].get("stream_interval", 1)):
            if self.cut_short and choice["finish_reason"]:
                break
            event = msgspec.json.encode({"request_id": "r", "usage": None, "choices": [choice]})
            await answer.write(b"data: " + event + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    async def _parts(self, body: dict[str, Any], interval: int) -> AsyncIterator[dict[str, Any]]:
        """Choices with new tokens; the last one has the end."""
        params = body["sampling_params"]
        seed = 0 if params["temperature"] == 0 else params["seed"]
        stops = {EOS, *(params.get("stop_token_ids") or ())}
        token_ids = self.answer(body["token_ids"], seed)[: params["max_tokens"]]
        spans: list[dict[str, Any]] = []
        sent, reported = 0, params.get("routed_experts_prompt_start", 0)
        for position in range(len(token_ids)):
            if self.token_s:
                await asyncio.sleep(self.token_s)
            await self.step()
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": position, "end": position})
            spans[-1]["end"] = position + 1
            self.sampled += 1
            last = position + 1 == len(token_ids)
            self.begun += (position == 0) - last
            if last or (interval < 1 << 30 and position % interval == 0):
                new = token_ids[sent : position + 1]
                sent = position + 1
                rows = None
                if self.experts is not None and (last or self.experts_in_parts):
                    computed = [*body["token_ids"], *token_ids[:position]]
                    rows, reported = self._said(self.experts(computed)[reported:], body), len(computed)
                yield {
                    "index": 0,
                    "token_ids": new,
                    "logprobs": {"content": [{"token_id": t, "logprob": -0.25 - t / 1024} for t in new]},
                    "finish_reason": ("stop" if token_ids[-1] in stops else "length") if last else None,
                    "weight_versions": spans if last else None,
                    "routed_experts": rows,
                }

    def _said(self, experts: NDArray[Any], body: dict[str, Any]) -> str | RowsReference:
        """Rows of experts as an answer has them."""
        if self.rows is None or not body.get(FIELD):
            return npy(experts)
        return self.rows.keep(uuid.uuid4().hex, npy_bytes(experts), engine=f"127.0.0.1:{self.said_port or self.port}")

    async def kept_rows(self, request: web.Request) -> web.Response:
        rows = None if self.rows is None else await self.rows.take(request.query["name"])
        return web.Response(status=404) if rows is None else web.Response(body=rows)

    async def step(self) -> None:
        """Before each token of each request."""
        if not self.unpaused.is_set():
            await self.unpaused.wait()
        while self.hung:
            await asyncio.sleep(0.01)

    async def pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep"
        # anything else would take the KV from requests in flight
        assert dict(request.query) == {"mode": "keep", "clear_cache": "false"}
        self.unpaused.clear()
        if self.slow_pause:
            await self.unpaused.wait()
        return web.json_response({"status": "paused"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.unpaused.is_set()})

    async def resume(self, _: web.Request) -> web.Response:
        self.unpaused.set()
        return web.json_response({"status": "resumed"})

    async def start_update(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        if self.fail_updates > 0:
            self.fail_updates -= 1
            return web.Response(status=500, text="ordered to fail")
        info = (await request.json())["update_info"]
        if self.in_place and not info.get("stage"):
            assert not self.unpaused.is_set()
            assert self._staged_s <= time.monotonic()
            self._staged = info["path"]
            return web.json_response({"message": "Weights updated"})
        if self.in_place:
            self._staged_s = time.monotonic() + self.update_s
            return web.json_response({"message": "Weights updated"})
        assert self.unpaused.is_set()
        await asyncio.sleep(self.update_s)
        await self.reads.wait()
        wanted = int(info["path"].rpartition("v")[2])
        if (self.torn or wanted == self.skip) and self.version.isdecimal():
            self._staged = info["path"].replace(f"v{wanted:06d}", f"v{int(self.version):06d}")
            skipped = [{"version": wanted, "reason": "ordered to"}]
            return web.json_response({"version": int(self.version), "skipped": skipped})
        self._staged = info["path"]
        return web.json_response({"version": int(self._staged.rpartition("v")[2])})

    async def metrics(self, _: web.Request) -> web.Response:
        running = min(self.in_flight, self.slots)
        values = {
            "num_requests_running": running,
            "num_requests_waiting": self.in_flight - running,
            "kv_cache_usage_perc": running / self.slots,
            "num_preemptions_total": 0,
            "generation_tokens_total": self.sampled,
            "prefix_cache_queries_total": 4 * self.started,
            "prefix_cache_hits_total": self.started,
        }
        return web.Response(text="".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items()))

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == PROVE_WEIGHTS:
            return web.json_response({"results": [msgspec.to_builtins(self.prove(body["args"][0]))]})
        assert body["method"] == "staged_handoff"
        return web.json_response({"results": ["True", str(time.monotonic() >= self._staged_s)]})

    def prove(self, path: str) -> WeightsProof:
        """Compare what was loaded last with a version, as an engine does with tensors of both."""
        wrong = ["model.norm.weight"] if self.wrong_weights or self._staged != path else []
        return WeightsProof(state="compared", compared=["model.norm.weight"], wrong=wrong, decisive=True)

    async def finish_update(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.exchange_s)
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

        async def info(_: web.Request) -> web.Response:
            return web.json_response({"weight_version": self.version})

        @web.middleware
        async def stopped(request: web.Request, handler: Any) -> web.StreamResponse:
            await self.awake.wait()
            answer: web.StreamResponse = await handler(request)
            await self.awake.wait()
            return answer

        app = web.Application(
            client_max_size=1 << 26, middlewares=[*([self.gate.middleware()] if self.gate else []), stopped]
        )
        app.add_routes(
            [
                web.get("/health", ok),
                web.get("/weight_info", info),
                web.get("/metrics", self.metrics),
                web.get("/is_paused", self.is_paused),
                web.get(PATH, self.kept_rows),
                web.post("/inference/v1/generate", self.generate),
                recorded("pause", self.pause),
                recorded("resume", self.resume),
                recorded("init_weight_transfer_engine", ok),
                recorded("start_weight_update", self.start_update),
                recorded("update_weights", self.update),
                recorded("finish_weight_update", self.finish_update),
                web.post("/collective_rpc", self.collective_rpc),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or self.port, backlog=4096)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]

    async def restart(self) -> None:
        """Come back on the same port as a new process does: with the start model, and told nothing."""
        await self.stop()
        self.version, self._staged = "initial", None
        self.awake.set()
        self.unpaused.set()
        self.reads.set()
        self.calls.clear()
        self.requests.clear()
        await self.start()

    async def stop(self) -> None:
        """Go away; connections are cut."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        await stop_serving(runner)


async def _serve(port: int, request_s: float, spread: float, tokens: int) -> None:
    stub = StubEngine(answer=(lambda token_ids, seed: [60] * tokens) if tokens else default_answer)
    stub.keep_requests = False
    stub.request_s = lambda number: request_s * (1.0 + spread * (coin(number).random() - 0.5))
    await stub.start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--request-s", type=float, default=1.0)
    parser.add_argument("--spread", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=0, help="answers of so many tokens; 0: of the environments")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(arguments.port, arguments.request_s, arguments.spread, arguments.tokens))
