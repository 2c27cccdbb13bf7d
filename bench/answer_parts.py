"""What it costs that answers come in parts: CPU of the orchestrator's client, and tokens a second of an engine.

The same requests with answers as a whole and in parts of several sizes, by turns. The client talks to a stub that
samples for nothing, so that its CPU time is that of reading answers; the engine is the embedded one with a small random
model, whose own CPU time is measured. Writes ``bench/results/answer_parts.json``.

    python bench/answer_parts.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import aiohttp
import msgspec
import psutil
from harness import ROOT, record, scratch, warmup

from hpcrl.network.ports import choose_blocks
from hpcrl.rollouts.engines.client import EngineClient, SamplingParams

HOST = "127.0.0.1"
STUB = ROOT / "tests/rollouts/stub_engine.py"
#: tokens of a part; 0 for a whole answer
INTERVALS = (0, 256, 64, 16, 1)
PROMPT = [60] * 100


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[psutil.Process]:
    """A process for as long as the context."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


async def serve_version(http: aiohttp.ClientSession, client: EngineClient) -> None:
    """Wait until the engine answers, and label its weights with a number."""
    deadline = time.monotonic() + 300.0
    while not await client.healthy(timeout_s=5.0):
        assert time.monotonic() < deadline, client.url
        await asyncio.sleep(0.2)
    with contextlib.suppress(Exception):  # the stub has no such call, and takes the next two
        await client.control("/update_weight_version", {"new_version": "0"}, timeout_s=30.0)
        return
    await client.control("/update_weights", {"update_info": {"path": "v000000"}}, timeout_s=30.0)
    await client.control("/finish_weight_update", {"weight_version": "0"}, timeout_s=30.0)


async def measure(url: str, server: psutil.Process, *, tokens: int, at_once: int, rounds: int) -> dict[str, object]:
    """Medians over rounds: CPU seconds of client and server for a million tokens, and tokens a second."""
    samples: dict[int, list[tuple[float, float, float]]] = {interval: [] for interval in INTERVALS}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = EngineClient(http, name="engine-0", url=url)
        await serve_version(http, client)

        async def once(interval: int, number: int) -> int:
            params = SamplingParams(
                temperature=1.0,
                max_tokens=tokens,
                seed=number,
                stop_token_ids=[],
                stream_interval=interval or msgspec.UNSET,
            )
            answer = await client.generate(PROMPT, params, cache_salt="0", session_id="s", timeout_s=600.0)
            return len(answer.token_ids)

        for round_ in range(rounds + 1):
            for interval in INTERVALS:
                before, began = (_cpu_s(psutil.Process()), _cpu_s(server)), time.perf_counter()
                count = sum(await asyncio.gather(*(once(interval, number) for number in range(at_once))))
                seconds = time.perf_counter() - began
                after = (_cpu_s(psutil.Process()), _cpu_s(server))
                if round_:  # the first warms up
                    scale = 1e6 / count
                    mine, theirs = ((b - a) * scale for a, b in zip(before, after, strict=True))
                    samples[interval].append((mine, theirs, count / seconds))
    names = ("client_cpu_s_per_million", "server_cpu_s_per_million", "tokens_per_s")
    return {
        str(interval or "whole"): {
            name: round(statistics.median(values), 2)
            for name, values in zip(names, zip(*found, strict=True), strict=True)
        }
        for interval, found in samples.items()
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", help="a model directory of the quickstart's size; made where it is not given")
    arguments = parser.parse_args()
    model = arguments.model
    if model is None:
        directory = scratch("parts") / "model"
        warmup("quickstart", directory, "model.warmup.steps=1")
        model = str(directory)
    port, engine_port = choose_blocks([1, 1], first=21000, last=29999, host=HOST)
    figures: dict[str, object] = {"load_average": round(os.getloadavg()[0], 1), "rounds": arguments.rounds}
    stub = [sys.executable, str(STUB), "--port", str(port), "--request-s", "0", "--tokens", "512"]
    with started(stub) as server:
        url = f"http://{HOST}:{port}"
        figures["stub"] = asyncio.run(measure(url, server, tokens=512, at_once=64, rounds=arguments.rounds))
    engine = [sys.executable, "-m", "hpcrl.inference.embedded.server", "--model", model, "--host", HOST]
    engine += ["--weight-version", "0"]
    engine += ["--port", str(engine_port), "--max-model-len", "512", "--max-num-seqs", "32", "--dtype", "float32"]
    with started(engine) as server:
        url = f"http://{HOST}:{engine_port}"
        figures["engine"] = asyncio.run(measure(url, server, tokens=256, at_once=32, rounds=arguments.rounds))
    print(figures)
    record("answer_parts", figures)


if __name__ == "__main__":
    main()
