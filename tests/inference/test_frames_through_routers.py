"""Answers of a real embedded engine through each real router: in frames where the router leaves them what they are.

Where it does not, tokens are text, and rows of experts stay at the engine, which gives them as raw bytes.
"""

from __future__ import annotations

import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
from engine_helpers import SERVED_NAME, Server, embedded_command, start_server, write_model
from real_router import Router

from hpcrl.network.generate_frames import MEDIA_TYPE
from hpcrl.network.routed_experts_reference import PATH
from hpcrl.rollouts.engines.client import EngineClient, Generation, SamplingParams
from hpcrl.rollouts.engines.router_client import RouterClient

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = [7 + n % 90 for n in range(70)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("model")
    flags = ("--enable-return-routed-experts", "--max-model-len", "256", "--dtype", "float32", "--weight-version", "7")
    server = start_server(embedded_command(*flags), path, write_model(path, seed=1), path.parent / "engine.log")
    yield server
    server.stop()


@pytest.fixture(params=["vllm-router", "dynamo"])
def router(engine: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Router]:
    router = Router(tmp_path / "router.log", request.param)
    router.start()
    url = f"{router.url}/add_worker?url={urllib.parse.quote(engine.url, safe='')}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30.0) as answer:
        assert answer.status == 200
    yield router
    router.kill()


async def ask(client: EngineClient, interval: int | msgspec.UnsetType) -> Generation:
    rows = {"routed_experts_prompt_start": 0}
    params = SamplingParams(temperature=1.0, max_tokens=9, seed=5, stop_token_ids=[], stream_interval=interval, **rows)
    return await client.generate(PROMPT, params, cache_salt="7", session_id="s", timeout_s=60.0)


async def test_answers_through_a_router_are_those_of_the_engine(engine: Server, router: Router) -> None:
    """As a whole and in parts."""
    ours = router.kind == "dynamo"
    kinds = []
    binary = "application/octet-stream"

    async def note(_: object, __: object, params: aiohttp.TraceRequestEndParams) -> None:
        assert (params.response.content_type == binary) == (params.url.path == PATH)
        kinds.append((params.url.port == router.port, params.response.content_type))

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(note)
    async with aiohttp.ClientSession(trace_configs=[trace]) as session:
        direct = EngineClient(session, name="engine-0", url=engine.url)
        through = RouterClient(session, name="router", url=router.url, hands_on_content_types=ours)
        through.behind = lambda: [direct]
        for interval, text, parts in ((msgspec.UNSET, "application/json", 1), (4, "text/event-stream", 3)):
            await ask(direct, interval)  # the others find its prompt in the cache, and round alike
            kinds.clear()
            wanted, found = [await ask(client, interval) for client in (direct, through)]
            fetched = [] if ours else [(False, binary)] * parts
            assert kinds == [(False, MEDIA_TYPE), (True, MEDIA_TYPE if ours else text), *fetched]
            for name in ("token_ids", "logprobs", "versions"):
                assert np.array_equal(getattr(found, name), getattr(wanted, name))
            assert found.finish_reason == wanted.finish_reason
            assert found.experts is not None
            assert wanted.experts is not None
            assert np.array_equal(found.experts, wanted.experts)


async def test_clients_that_do_not_accept_frames_get_json(router: Router) -> None:
    body = {"model": SERVED_NAME, "token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "logprobs": 1}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{router.url}/inference/v1/generate", json=body) as answer,
    ):
        assert answer.content_type == "application/json"
        (choice,) = (await answer.json())["choices"]
        assert len(choice["token_ids"]) == 2
