"""The whole orchestrator under the routed experts of the reference run: lag of its event loop, memory, processor.

256 rollouts of 131,072 tokens in a step of 300 s are 112,000 tokens a second; with 78 layers and 8 experts a token that
is 70 MB a second. Here as many tokens and bytes a second come in vLLM's text form, from a process whose answers are
made beforehand (they would cost more than the orchestrator does): in rollouts of 8,192 tokens whose answers come
whole, or with ``--long`` in rollouts of 131,072 tokens over four turns, which are streamed in parts of 64 tokens, those
of all requests at a time, as an engine's steps end. Each rollout is made durable and given to the warehouse; batches
are taken as a trainer takes them. Writes ``bench/results/orchestrator_routes.json``, or ``..._long.json``.

    python bench/orchestrator_routes.py
    python bench/orchestrator_routes.py --long --in-flight 32 --share 0.5
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from harness import record
from orchestrator_scale import GOAL_P99_MS, STUB, bench

from hpcrl.models.known import find_config

sys.path.insert(0, str(STUB.parent))
from stub_engine import EOS, StubEngine, coin, encode

LAYERS, EXPERTS = 78, 8
TOKENS_S = 256 * 131_072 / 300


class Shape:
    """What rollouts look like: tokens of an answer, answers of a rollout, tokens of a part (0: answers come whole)."""

    def __init__(self, *, long: bool) -> None:
        self.long = long
        self.turns, self.tokens, self.part = (4, 32_768, 64) if long else (1, 8192, 0)

    @property
    def rollout_tokens(self) -> int:
        return self.turns * self.tokens

    def settings(self) -> dict[str, Any]:
        """Of the recipe: a tool is called after each turn but the last."""
        rollouts: dict[str, Any] = {
            "rollouts_per_step": 16 if self.long else 64,
            "group_size": 8,
            "sampling": {"max_new_tokens": self.tokens},
            "stream_interval": self.part or 64,
            "warehouse": {"limit_gib": 2},
        }
        return {
            "engine": {"return_routed_experts": True, "max_model_len": 2 * self.rollout_tokens},
            "environments": [{"name": "calculator", "kind": "calculator", "max_turns": self.turns}],
            "rollouts": rollouts,
        }


class RoutedEngine(StubEngine):
    """Answers with the same tokens and rows; only the lengths of prompts differ."""

    def __init__(self, shape: Shape, request_s: float) -> None:
        super().__init__()
        self.experts = lambda token_ids: np.zeros((len(token_ids), LAYERS, EXPERTS), np.uint8)
        self.keep_requests = False
        self._shape, self._request_s = shape, request_s
        self._rows = np.random.default_rng(0).integers(0, 256, (2 * shape.tokens, LAYERS, EXPERTS), np.uint8)
        self._events: dict[tuple[int, int, int, bool], bytes] = {}
        said = encode("run 1")
        self._text = [*said, *encode(" ") * (shape.tokens - len(said) - 1), EOS]

    def _event(self, first: int, end: int, rows: int) -> bytes:
        """Tokens ``first`` to ``end`` of the answer, with so many rows."""
        last = end == len(self._text)
        key = (min(first, 64), end - first, rows, last)
        if key not in self._events:
            stream = io.BytesIO()
            np.save(stream, self._rows[:rows])
            choice = {
                "index": 0,
                "token_ids": self._text[first:end],
                "logprobs": {"content": [{"token_id": 60, "logprob": -0.5}] * (end - first)},
                "finish_reason": "stop" if last else None,
                "weight_versions": "SPANS" if last else None,
                "routed_experts": base64.b64encode(stream.getvalue()).decode(),
            }
            event = msgspec.json.encode({"request_id": "r", "usage": None, "choices": [choice]})
            self._events[key] = b"data: " + event + b"\n\n"
        if not last:
            return self._events[key]
        spans = msgspec.json.encode([{"version": self.version, "start": 0, "end": end}])
        return self._events[key].replace(b'"SPANS"', spans, 1)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["sampling_params"]["temperature"] == 0:  # an evaluation, which is not what is measured
            return await super()._stream(request, body)
        count, part = len(self._text), self._shape.part or len(self._text)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        # rows of tokens that another answer has given are not asked for again
        rows = len(body["token_ids"]) - body["sampling_params"].get("routed_experts_prompt_start", 0)
        ends = [*range(1, count, part), count] if self._shape.part else [count]
        interval = self._request_s / len(ends)
        first = 0
        for end in ends:
            if self._shape.part:
                await asyncio.sleep(interval * math.ceil(time.monotonic() / interval + 1e-3) - time.monotonic())
            await answer.write(self._event(first, end, rows + end - 1 - max(0, first - 1) - (rows if first else 0)))
            first = end
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


async def serve(port: int, shape: Shape, request_s: float) -> None:
    engine = RoutedEngine(shape, request_s)
    # of parts each has its own time
    engine.request_s = lambda number: request_s * ((0.5 + coin(number).random()) if not shape.part else 0.0)
    await engine.start(port)
    await asyncio.Event().wait()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="rollouts of 131,072 tokens, streamed over four turns")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--share", type=float, default=1.0, help="of the reference run's tokens a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--request-s", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = Shape(long=arguments.long or "HPCRL_BENCH_LONG" in os.environ)
    if arguments.port:
        asyncio.run(serve(arguments.port, shape, arguments.request_s))
    if shape.long:
        os.environ["HPCRL_BENCH_LONG"] = "1"  # for the engines, which are this program
    request_s = arguments.in_flight * shape.tokens / (arguments.share * TOKENS_S)
    result = bench(
        arguments.in_flight,
        1,
        request_s,
        arguments.seconds,
        engine=Path(__file__).resolve(),
        settings=shape.settings(),
        facts=find_config("GLM-5"),
    )
    result["rollout_tokens"], result["share"] = shape.rollout_tokens, arguments.share
    result["routes_mb_s"] = round(result["rollouts_per_s"] * shape.rollout_tokens * LAYERS * EXPERTS / 1e6, 1)
    result |= {"load_average": round(os.getloadavg()[0], 1), "goal_loop_lag_p99_ms": GOAL_P99_MS}
    for name, value in result.items():
        print(f"{name:22} {value}")
    record("orchestrator_routes_long" if shape.long else "orchestrator_routes", result)


if __name__ == "__main__":
    main()
