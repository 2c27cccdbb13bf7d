"""The scripted rollouts of the bench of agents as a taskset of verifiers, its server, and its client.

It is no bench itself: `bench/agents.py` runs it with the interpreter that has verifiers, as ``serve`` and as ``drive``.
The harness starts no program: it lets the player of the bench call the endpoint that verifiers gives it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.serve import EnvClient, serve_env
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import resolve_env_config

__all__ = ["ScriptHarness", "ScriptTaskset"]

PERIOD_S = 0.01


class Lag:
    """By how many seconds the event loop of this process is late, a hundred times a second; kept in a file."""

    running: asyncio.Task[None] | None = None

    @classmethod
    def watch(cls, name: str) -> None:
        """Begin, once."""
        if cls.running is None:
            path = Path(os.environ["BENCH_LAGS"]) / f"{name}-{os.getpid()}.json"
            cls.running = asyncio.create_task(cls._run(path))

    @staticmethod
    async def _run(path: Path) -> None:
        late: list[float] = []
        while True:
            before = time.monotonic()
            await asyncio.sleep(PERIOD_S)
            late.append(max(0.0, time.monotonic() - before - PERIOD_S))
            if len(late) % 500 == 0:
                path.write_text(json.dumps(late))


class ScriptTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def points(self, trace: Any) -> float:
        return 1.0


class ScriptTaskset(vf.Taskset[ScriptTask, vf.TasksetConfig]):
    def load(self) -> list[ScriptTask]:
        return [ScriptTask(vf.TaskData(prompt="go"))]


class ScriptHarnessConfig(HarnessConfig):
    pass


class ScriptHarness(Harness[ScriptHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0917 - as verifiers has it
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: vf.TaskData
    ) -> ProgramResult:
        """Let the player play this rollout."""
        Lag.watch("worker")
        async with httpx.AsyncClient(timeout=None) as http:
            answer = await http.post(f"{os.environ['BENCH_PLAYER']}/play", json={"url": endpoint, "key": secret})
        return ProgramResult(exit_code=int(answer.status_code != 200), stdout="", stderr=answer.text)


def serve(address: str) -> None:
    """Serve the environment as verifiers does, with as many workers as it wants."""
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "agents_verifiers"}}
    config = resolve_env_config({"taskset": {"id": "agents_verifiers"}, "agent": agent})
    serve_env(max_workers=None, address=address, config=config)


async def drive(address: str, engine: str, model: str, rollouts: int) -> None:
    """Run rollouts by verifiers' client, all at once, as a trainer's orchestrator does; print what came of it."""
    client = EnvClient(address)
    await client.wait_for_server_startup()
    config = TrainClientConfig(
        base_url=f"{engine}/v1",
        renderer_model_name=model,
        renderer={"name": "qwen3"},  # type: ignore[arg-type]
    )
    sampling = SamplingConfig(temperature=1.0, max_tokens=256)

    async def run(count: int) -> list[Any]:
        tasks = [{"idx": number, "prompt": "go"} for number in range(count)]
        runs = [client.run(config, "policy", sampling, task) for task in tasks]
        return await asyncio.gather(*runs, return_exceptions=True)

    # the first rollout of a worker loads a tokenizer
    await run(1)
    print("warm", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    Lag.watch("client")
    results = await run(rollouts)
    failed = [repr(each) for each in results if isinstance(each, BaseException)]
    done = [each for each in results if not isinstance(each, BaseException)]
    failed += [str(each.errors or each.traces[0].errors)[:500] for each in done if not each.ok]
    calls = sum(len(each.traces[0].calls) for each in done if each.traces)
    print(json.dumps({"failed": len(failed), "why": failed[:3], "calls": calls}), flush=True)
    await client.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        asyncio.run(drive(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])))
