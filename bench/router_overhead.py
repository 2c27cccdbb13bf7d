"""What each router adds to a request: the same requests directly and through it, by turns, to the same stub engine.

The stub answers at once, so that nothing but the way there is measured. Prompts of several lengths, because the router
reads and forwards each body. Writes ``bench/results/router_overhead.json``.

    HPCRL_VLLM_PYTHON=.venv-vllm/bin/python python bench/router_overhead.py
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
from pathlib import Path

import aiohttp
from harness import ROOT, record

from hpcrl.config.load import load_recipe
from hpcrl.jobplan.commands.router import ROUTER_PORTS, ROUTER_VARIABLES, router_command
from hpcrl.network.ports import choose_blocks
from hpcrl.rollouts.engines.client import EngineClient, SamplingParams
from hpcrl.rollouts.engines.router_client import RouterClient
from hpcrl.supervisor.launch.commands import fill_placeholders

HOST = "127.0.0.1"
STUB = ROOT / "tests/rollouts/stub_engine.py"
LENGTHS = (100, 10_000)
KINDS = ("vllm-router", "dynamo")


@contextlib.contextmanager
def started(command: list[str], **env: str) -> Iterator[None]:
    """A process for as long as the context."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **env})
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def wait_for(http: aiohttp.ClientSession, url: str) -> None:
    """Until it answers."""
    deadline = time.monotonic() + 60.0
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(url) as answer:
                if answer.status == 200:
                    return
        assert time.monotonic() < deadline, url
        await asyncio.sleep(0.1)


async def measure(requests: int, in_flight: int, engine_url: str, router_url: str) -> dict[str, dict[str, float]]:
    """Milliseconds by length of the prompt."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await wait_for(http, f"{engine_url}/health")
        await wait_for(http, f"{router_url}/liveness")
        router = RouterClient(http, name="router", url=router_url)
        direct = EngineClient(http, name="engine", url=engine_url)
        # the label of weights that the client takes for a version
        for path, value in (("update_weights", {"update_info": {"path": "v000000"}}), ("finish_weight_update", None)):
            await direct.control(f"/{path}", value or {"weight_version": "0"}, timeout_s=5.0)
        if engine_url not in await router.workers(timeout_s=5.0):
            await router.add(engine_url, timeout_s=30.0)
        params = SamplingParams(temperature=0.0, max_tokens=16, seed=0, stop_token_ids=[2])

        async def once(client: EngineClient, length: int, number: int) -> float:
            prompt = [60 + number % 30] * length  # letters: the stub plays a game of words
            began = time.perf_counter()
            session = f"group-{number % 32}"
            await client.generate(prompt, params, cache_salt="0", session_id=session, timeout_s=60.0)
            return 1e3 * (time.perf_counter() - began)

        figures = {}
        for length in LENGTHS:
            times: dict[str, list[float]] = {"direct": [], "routed": []}
            for number in range(0, requests, in_flight):
                # by turns: what else the machine does meets both
                for name, client in (("direct", direct), ("routed", router)):
                    batch = [once(client, length, number + i) for i in range(in_flight)]
                    times[name] += await asyncio.gather(*batch)
            medians = {name: statistics.median(values[in_flight:]) for name, values in times.items()}
            figures[str(length)] = {
                "direct_ms": round(medians["direct"], 3),
                "routed_ms": round(medians["routed"], 3),
                "added_ms": round(medians["routed"] - medians["direct"], 3),
            }
        return figures


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=96)
    arguments = parser.parse_args()
    python = os.environ.get("HPCRL_VLLM_PYTHON", str(Path(ROOT) / ".venv-vllm/bin/python"))
    figures: dict[str, object] = {"load_average": round(os.getloadavg()[0], 1), "requests": arguments.requests}
    for kind in KINDS:
        port, router_port = choose_blocks([1, ROUTER_PORTS], first=21000, last=29999, host=HOST)
        command = router_command(load_recipe("quickstart_vllm", [f"engine.router.kind={kind}"]).value)
        command = fill_placeholders(command, {"python": python, "host": HOST, "port": str(router_port)})
        stub = [sys.executable, str(STUB), "--port", str(port), "--request-s", "0", "--spread", "0"]
        with started(stub), started(command, **ROUTER_VARIABLES):
            urls = f"http://{HOST}:{port}", f"http://{HOST}:{router_port}"
            figures[kind] = {
                f"in_flight_{in_flight}": asyncio.run(measure(arguments.requests, in_flight, *urls))
                for in_flight in (1, 16)
            }
    print(figures)
    record("router_overhead", figures)


if __name__ == "__main__":
    main()
