"""What an answer with routed experts, and its request, cost in text and in binary: seconds of both processes, and lag.

A process answers as the embedded engine does, with rows of 75 layers and 8 experts a token: base64 in JSON, as to
people; JSON without rows, which are fetched (`hpcrl.network.routed_experts_reference`), as behind vllm-router; or
frames (`hpcrl.network.generate_frames`), and then requests are frames as well. The orchestrator's own client asks by
turns for each; its CPU time and that of the server are measured, and how late the client's event loop was. The last
size has tokens alone, so that it says what columns of tokens are worth. Writes ``bench/results/binary_answers.json``.

    python bench/binary_answers.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from typing import cast

import aiohttp
import numpy as np
import psutil
import stand_in_engine
from aiohttp import web
from harness import record

from hpcrl.inference.embedded.engine.request import Output, VersionSpan
from hpcrl.inference.embedded.serving import api_generate
from hpcrl.inference.embedded.serving.api_common import frame_response, json_response, takes_frames
from hpcrl.inference.embedded.serving.protocol import GenerateRequest, parse
from hpcrl.inference.embedded.serving.serving import Serving
from hpcrl.network.routed_experts_reference import PATH
from hpcrl.rollouts.engines.client import EngineClient, SamplingParams

LAYERS, EXPERTS = 75, 8
#: tokens of a prompt whose rows are asked for, tokens of the answer
SIZES = {"8k tokens, routes": (8192 - 512, 512), "131k tokens, routes": (131_072 - 512, 512), "8k tokens": (0, 8192)}


async def serve(port: int) -> None:
    """An engine that has everything, and encodes it anew for each request, as the embedded one does."""
    rng, api = np.random.default_rng(0), api_generate.GenerateApi(cast(Serving, None))
    rows = rng.integers(0, 256, (max(sum(size) for size in SIZES.values()), LAYERS, EXPERTS), np.uint8)

    async def generate(request: web.Request) -> web.Response:
        params = (await parse(request, GenerateRequest)).sampling_params
        count, prompt = params.max_tokens, params.seed
        output = Output(
            token_ids=rng.integers(0, 150_000, count).tolist(),
            logprobs=(-rng.random(count)).tolist(),
            ranks=[1] * count,
            top=[],
            finish_reason="length",
            weight_versions=[VersionSpan("0", 0, count)],
            routed_experts=rows[: prompt + count - 1] if prompt else None,
        )
        framed = takes_frames(request)
        columns = api_generate._binary_columns if framed else api_generate._text_columns
        if not framed and request.headers["x-session-id"] == "reference":
            columns = api._columns_aside(request)
        spans = [{"version": "0", "start": 0, "end": count}]
        choice = {"finish_reason": "length", "weight_versions": spans, **columns(output, params.logprobs)}
        return (frame_response if framed else json_response)({"request_id": "r", "choices": [choice]})

    await stand_in_engine.serve(generate, port, web.get(PATH, api.rows))


async def measure(url: str, server: psutil.Process, rounds: int) -> dict[str, object]:
    """Medians over rounds, of one answer."""
    figures: dict[str, object] = {}
    sent, rng = list[int](), np.random.default_rng(1)

    async def note(_: object, __: object, params: aiohttp.TraceRequestChunkSentParams) -> None:
        sent.append(len(params.chunk))

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(note)
    async with aiohttp.ClientSession(trace_configs=[trace]) as http, stand_in_engine.lateness() as late:
        clients = {kind: EngineClient(http, name="engine-0", url=url) for kind in ("text", "reference", "binary")}
        clients["text"].accepts = clients["reference"].accepts = "application/json"
        await stand_in_engine.reached(clients["text"])
        for name, (prompt, count) in SIZES.items():
            samples: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in clients}
            params = SamplingParams(temperature=1.0, max_tokens=count, seed=prompt, stop_token_ids=[])
            if prompt:
                params = SamplingParams(
                    temperature=1.0, max_tokens=count, seed=prompt, stop_token_ids=[], routed_experts_prompt_start=0
                )
            for round_ in range(rounds + 1):
                for kind, client in clients.items():
                    late.clear()
                    sent.clear()
                    before, began = (_cpu_s(psutil.Process()), _cpu_s(server)), time.perf_counter()
                    tokens = rng.integers(0, 150_000, prompt).tolist()
                    answer = await client.generate(tokens, params, cache_salt="0", session_id=kind, timeout_s=120.0)
                    seconds = time.perf_counter() - began
                    assert len(answer.token_ids) == count
                    assert (answer.experts is not None) == bool(prompt)
                    if round_:
                        mine, theirs = _cpu_s(psutil.Process()) - before[0], _cpu_s(server) - before[1]
                        samples[kind].append((seconds, mine, theirs, 1e3 * max(late, default=0.0), sum(sent)))
            names = ("seconds", "client_cpu_s", "server_cpu_s", "longest_lag_ms", "request_bytes")
            figures[name] = {
                kind: {n: round(statistics.median(v), 4) for n, v in zip(names, zip(*found, strict=True), strict=True)}
                for kind, found in samples.items()
            }
    return figures


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
    figures: dict[str, object] = {"load_average": round(os.getloadavg()[0], 1), "rounds": arguments.rounds}
    with stand_in_engine.started(__file__) as (port, pid):
        figures |= asyncio.run(measure(f"http://{stand_in_engine.HOST}:{port}", psutil.Process(pid), arguments.rounds))
    print(figures)
    record("binary_answers", figures)


if __name__ == "__main__":
    main()
