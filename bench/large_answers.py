"""What large answers and long rollouts cost the orchestrator's event loop.

Events of 32 MiB (routed experts of 8,192 tokens of a model like GLM-5, as base64 in JSON) come from a process of their
own, four at a time, while the event loop that reads them measures how late it is: without any, as they are decoded
beside it, and as they would be decoded in it. Then a rollout of 131,072 tokens in 64 turns: what its conversation
costs, and what it costs to encode the whole prompt for each turn. Writes ``bench/results/large_answers.json``.

    python bench/large_answers.py
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
import time
from collections.abc import Iterator

import aiohttp
import msgspec
import numpy as np
import psutil
import stand_in_engine
from aiohttp import web
from harness import record

from hpcrl.rollouts.core.token_sequence import TokenSequence
from hpcrl.rollouts.engines import client as client_module
from hpcrl.rollouts.engines.client import EngineClient, SamplingParams
from hpcrl.rollouts.process import prefer_event_loop

TOKENS, LAYERS, EXPERTS = 8192, 75, 40
AT_ONCE = 4
ROLLOUT_TOKENS, TURNS = 131_072, 64


async def serve(port: int) -> None:
    """An engine that answers every request with the same large event."""
    stream = io.BytesIO()
    np.save(stream, np.random.default_rng(0).integers(0, 256, (TOKENS, LAYERS, EXPERTS), np.uint8))
    choice = {
        "token_ids": [5],
        "logprobs": {"content": [{"logprob": -0.5}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        "routed_experts": base64.b64encode(stream.getvalue()).decode(),
    }
    event = b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"

    async def generate(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event)
        return response

    await stand_in_engine.serve(generate, port)


async def measure_events(port: int, count: int) -> dict[str, object]:
    """Seconds an event, and how late the event loop was meanwhile."""
    params = SamplingParams(
        temperature=1.0, max_tokens=8, seed=1, stop_token_ids=[], stream_interval=64, routed_experts_prompt_start=0
    )
    prompt = [60] * TOKENS
    async with aiohttp.ClientSession() as http:
        client = EngineClient(http, name="engine-0", url=f"http://{stand_in_engine.HOST}:{port}")
        await stand_in_engine.reached(client)
        await client.generate(prompt, params, cache_salt="0", session_id="s", timeout_s=60.0)
        figures: dict[str, object] = {
            "events": count,
            "event_mib": round(TOKENS * LAYERS * EXPERTS * 4 / 3 / (1 << 20), 1),
        }
        async with stand_in_engine.lateness() as late:
            for name, large in (
                ("no events", 0),
                ("beside the loop", client_module._LARGE_BYTES),
                ("in the loop", 1 << 40),
            ):
                late.clear()
                began = time.perf_counter()
                if not large:
                    await asyncio.sleep(5.0)
                client_module._LARGE_BYTES = large
                todo, rss = iter(range(count if large else 0)), [psutil.Process().memory_info().rss]

                async def ask(todo: Iterator[int] = todo, rss: list[int] = rss) -> None:
                    for _ in todo:
                        answer = await client.generate(prompt, params, cache_salt="0", session_id="s", timeout_s=60.0)
                        assert answer.experts is not None
                        rss.append(psutil.Process().memory_info().rss)

                await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
                figures[name] = {
                    "seconds_an_event": round((time.perf_counter() - began) / count, 3) if large else 0.0,
                    **{f"lag_p{q}_ms": round(1e3 * float(np.percentile(late, q)), 1) for q in (50, 90, 99)},
                    "lag_max_ms": round(1e3 * max(late), 1),
                    "rss_mib": round(max(rss) / (1 << 20)),
                }
    return figures


def measure_conversation() -> dict[str, float]:
    """Seconds of one rollout."""
    rng, size = np.random.default_rng(1), ROLLOUT_TOKENS // TURNS // 2
    turns = [rng.integers(0, 151_000, (2, size), np.int32) for _ in range(TURNS)]
    began = time.perf_counter()
    tokens = TokenSequence()
    for said, sampled in turns:
        tokens.append_said(said)
        request = msgspec.json.encode({"token_ids": tokens.encoded.raw})
        tokens.append_sampled(sampled, np.zeros(size, np.float32), np.zeros(size, np.int32))
    ours, began = time.perf_counter() - began, time.perf_counter()
    whole: list[int] = []
    for said, sampled in turns:
        whole += said.tolist()
        again = msgspec.json.encode({"token_ids": whole})
        whole += sampled.tolist()
    assert again == request
    return {"conversation_ms": round(1e3 * ours, 1), "encoded_anew_ms": round(1e3 * (time.perf_counter() - began), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
    with stand_in_engine.started(__file__) as (port, _):
        figures: dict[str, object] = {"load_average": round(os.getloadavg()[0], 1)}
        prefer_event_loop()
        figures |= asyncio.run(measure_events(port, arguments.events))
    figures |= measure_conversation()
    print(figures)
    record("large_answers", figures)


if __name__ == "__main__":
    main()
