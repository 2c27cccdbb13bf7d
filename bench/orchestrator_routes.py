"""The whole orchestrator under the routed experts of the reference run: lag of its event loop, memory, processor.

256 rollouts of 131,072 tokens in a step of 300 s are 112,000 tokens a second; with 78 layers and 8 experts a token that
is 70 MB a second. Here as many tokens and bytes a second come in rollouts of 8,192 tokens, in vLLM's text form, from a
process whose answers are made beforehand (they would cost more than the orchestrator does). Each rollout is made
durable and given to the warehouse; batches are taken as a trainer takes them. Writes
``bench/results/orchestrator_routes.json``.

    python bench/orchestrator_routes.py
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from harness import record
from orchestrator_scale import GOAL_P99_MS, STUB, bench

from hpcrl.models.known import find_config

sys.path.insert(0, str(STUB.parent))
from stub_engine import StubEngine, coin

LAYERS, EXPERTS, TOKENS = 78, 8, 8192
TOKENS_S = 256 * 131_072 / 300
SETTINGS: dict[str, Any] = {
    "engine": {"return_routed_experts": True, "max_model_len": 2 * TOKENS},
    "rollouts": {
        "rollouts_per_step": 64,
        "group_size": 8,
        "sampling": {"max_new_tokens": TOKENS},
        "warehouse": {"limit_gib": 2},
    },
}


class RoutedEngine(StubEngine):
    """Answers with the same tokens and rows; only the lengths of prompts differ."""

    def __init__(self) -> None:
        super().__init__()
        self.keep_requests = False
        self._rows = np.random.default_rng(0).integers(0, 256, (2 * TOKENS, LAYERS, EXPERTS), np.uint8)
        self._answers: dict[tuple[int, int, int], bytes] = {}

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        count = min(TOKENS, body["sampling_params"]["max_tokens"])
        # rows of tokens that another answer has given are not asked for again
        start = body["sampling_params"].get("routed_experts_prompt_start", 0)
        key = (start, len(body["token_ids"]), count)
        if key not in self._answers:
            stream = io.BytesIO()
            np.save(stream, self._rows[start : len(body["token_ids"]) + count - 1])
            choice = {
                "index": 0,
                "token_ids": [60] * count,
                "logprobs": {"content": [{"token_id": 60, "logprob": -0.5}] * count},
                "finish_reason": "length",
                "weight_versions": "SPANS",
                "routed_experts": base64.b64encode(stream.getvalue()).decode(),
            }
            self._answers[key] = msgspec.json.encode({"request_id": "r", "usage": None, "choices": [choice]})
        spans = msgspec.json.encode([{"version": self.version, "start": 0, "end": count}])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        await answer.write(b"data: " + self._answers[key].replace(b'"SPANS"', spans, 1) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


async def serve(port: int, request_s: float) -> None:
    engine = RoutedEngine()
    engine.request_s = lambda number: request_s * (0.5 + coin(number).random())
    await engine.start(port)
    await asyncio.Event().wait()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--share", type=float, default=1.0, help="of the reference run's tokens a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--request-s", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port:
        asyncio.run(serve(arguments.port, arguments.request_s))
    request_s = arguments.in_flight * TOKENS / (arguments.share * TOKENS_S)
    result = bench(
        arguments.in_flight,
        1,
        request_s,
        arguments.seconds,
        engine=Path(__file__).resolve(),
        settings=SETTINGS,
        facts=find_config("GLM-5"),
    )
    result["routes_mb_s"] = round(result["rollouts_per_s"] * TOKENS * LAYERS * EXPERTS / 1e6, 1)
    result |= {"load_average": round(os.getloadavg()[0], 1), "goal_loop_lag_p99_ms": GOAL_P99_MS}
    for name, value in result.items():
        print(f"{name:22} {value}")
    record("orchestrator_routes", result)


if __name__ == "__main__":
    main()
