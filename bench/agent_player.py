"""Programs of the bench of agents: an engine that says one scripted turn, and a player of scripted rollouts.

    python bench/agent_player.py engine PORT     # answers each request with the same tokens, after --engine-s seconds
    python bench/agent_player.py player PORT     # plays rollouts against endpoints of OpenAI's API, and times each call

Both serve until they are killed. `bench/agents.py` starts them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent

#: a call of a tool, as the format qwen3 has it
SAID = '<tool_call>\n{"name": "bash", "arguments": {"command": "python -m pytest -q tests"}}\n</tool_call><|im_end|>'
#: what the tool returns, for each turn another text
RETURNED = "turn {turn} of rollout {number}: " + "3 passed, 1 failed: assert 41 == 42. " * 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
TASK = "Repair the function `add` of the package, so that all of its tests pass. Use the tool `bash`."


def raise_file_limit() -> None:
    """Allow as many open connections as the system does."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve_engine(port: int, token_ids: list[int], engine_s: float) -> None:
    """Serve vLLM's API; each request gets the same tokens."""
    sys.path.append(str(ROOT / "tests" / "rollouts"))
    from stub_engine import StubEngine  # noqa: PLC0415 - its directory has modules with names of those here

    class ScriptedEngine(StubEngine):
        """Says the same turn without reading what it is asked."""

        async def generate(self, request: web.Request) -> web.StreamResponse:
            body = await request.read()
            self.in_flight += 1
            try:
                await asyncio.sleep(engine_s)
            finally:
                self.in_flight -= 1
            scores = [{"token": f"token_id:{each}", "token_id": each, "logprob": -0.5} for each in token_ids]
            choice = {
                "index": 0,
                "token_ids": token_ids,
                "logprobs": {"content": scores},
                "finish_reason": "stop",
                "weight_versions": [{"version": self.version, "start": 0, "end": len(token_ids)}],
                "routed_experts": None,
            }
            data = msgspec.json.encode({"request_id": "r", "usage": None, "choices": [choice]})
            if b'"stream":true' not in body:
                return web.Response(body=data, content_type="application/json")
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await answer.prepare(request)
            await answer.write(b"data: " + data + b"\n\ndata: [DONE]\n\n")
            await answer.write_eof()
            return answer

    await ScriptedEngine().start(port)
    await asyncio.Event().wait()


class Player:
    """Plays rollouts: each turn sends the whole history, and gets a call of a tool.

    Turn k of a rollout begins k periods after its first one, or when the answer before it is there.
    """

    def __init__(self) -> None:
        self.settings: dict[str, float] = {}
        self.began_s = time.perf_counter()
        self.latencies: list[float] = []
        self.failed: list[str] = []
        self.begun = self.done = 0
        self.http: aiohttp.ClientSession

    async def set_up(self, http: web.Request) -> web.Response:
        """Begin a measurement: ``turns``, ``period_s`` and ``ramp_s``."""
        self.settings = await http.json()
        self.latencies, self.failed, self.begun, self.done = [], [], 0, 0
        self.began_s = time.perf_counter()
        return web.json_response({})

    async def figures(self, _: web.Request) -> web.Response:
        """Return what was measured since."""
        seconds = time.perf_counter() - self.began_s
        state = {"begun": self.begun, "done": self.done, "failed": len(self.failed), "why": self.failed[:3]}
        return web.json_response({**state, "calls": len(self.latencies), "seconds": seconds})

    async def times(self, _: web.Request) -> web.Response:
        """Return the seconds of all calls."""
        return web.Response(body=msgspec.json.encode(self.latencies), content_type="application/json")

    async def play(self, http: web.Request) -> web.Response:
        """Play one rollout at an endpoint, to its end."""
        asked = await http.json()
        number, self.begun = self.begun, self.begun + 1
        try:
            await self._play(number, asked["url"], asked["key"])
        except Exception as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            raise
        self.done += 1
        return web.json_response({})

    async def _play(self, number: int, url: str, key: str) -> None:
        settings, due = self.settings, time.perf_counter() + random.Random(number).random() * self.settings["ramp_s"]
        messages: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        for turn in range(int(settings["turns"])):
            await asyncio.sleep(max(0.0, due + turn * settings["period_s"] - time.perf_counter()))
            body = msgspec.json.encode({"model": "policy", "messages": messages, "tools": TOOLS})
            began = time.perf_counter()
            async with self.http.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                data = await response.read()
            self.latencies.append(time.perf_counter() - began)
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {data[:300]!r}")
            message = msgspec.json.decode(data)["choices"][0]["message"]
            (call,) = message["tool_calls"]
            messages.append({"role": "assistant", "content": message["content"], "tool_calls": [call]})
            returned = RETURNED.format(turn=turn, number=number)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": returned})

    async def serve(self, port: int) -> None:
        """Serve until cancelled."""
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.post("/set_up", self.set_up),
                web.post("/play", self.play),
                web.get("/figures", self.figures),
                web.get("/times", self.times),
            ]
        )
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=600.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.http:
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
            await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("engine", "player"))
    parser.add_argument("port", type=int)
    parser.add_argument("--engine-s", type=float, default=0.5, help="seconds of each answer of the engine")
    parser.add_argument("--token-ids", type=json.loads, default=[2], help="tokens of its answers, as JSON")
    given = parser.parse_args()
    raise_file_limit()
    if given.part == "engine":
        asyncio.run(serve_engine(given.port, given.token_ids, given.engine_s))
    else:
        asyncio.run(Player().serve(given.port))


if __name__ == "__main__":
    main()
