"""Two real vLLM engines behind Dynamo's router, started by the commands of a plan: it knows what is in their caches."""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from engine_helpers import logprob_error
from patience import wait_for
from vllm_fleet import HOST, Fleet, generate

from hpcrl.config.plan import Role
from hpcrl.modeling.decoder import Decoder

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]

NAME = "quickstart_vllm"
BLOCK = 32
TOLERANCE = 2e-3
REQUESTS, CACHED = "hpcrl_router_requests_total", "hpcrl_router_cached_tokens_total"
SETTINGS = (
    "engine.replicas=2",
    "engine.kv_store=null",
    "engine.router.kind=dynamo",
    # what is in their caches decides alone
    "engine.router.session_ttl_s=0",
)


@pytest.fixture(scope="module")
def fleet(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("dynamo") / "run", tiny, *SETTINGS)
    try:
        engines = fleet.start(Role.ENGINE)
        (router,) = fleet.start(Role.ROUTER, timeout_s=120.0)
        for engine in engines:
            assert router.call(f"/add_worker?url={engine.url}", {})[0] == 200
        yield fleet
    finally:
        fleet.stop()


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(7, 103) for _ in range(length)]


def counted(fleet: Fleet, name: str) -> dict[str, float]:
    """A counter of the router, by engine."""
    port = urlsplit(fleet.servers[Role.ROUTER, 0].url).port
    request = urllib.request.Request(f"http://{HOST}:{port + 1}/metrics", headers=fleet.headers)
    with urllib.request.urlopen(request, timeout=10.0) as answer:
        text = answer.read().decode()
    return {url: float(value) for url, value in re.findall(rf'^{name}{{worker="(.*)"}} (\S+)$', text, re.MULTILINE)}


def test_a_prompt_goes_where_it_is_cached(fleet: Fleet, tiny: tuple[Path, Decoder]) -> None:
    router = fleet.servers[Role.ROUTER, 0]
    prompts = {seed: prompt_of(10 * BLOCK, seed) for seed in range(4)}

    def ask(prompt: list[int], salt: str) -> tuple[str, float, Any]:
        """Which engine was chosen, with how many cached tokens, and its answer."""
        requests, cached = counted(fleet, REQUESTS), counted(fleet, CACHED)
        choice = generate(router, NAME, prompt, cache_salt=salt)
        after, hits = counted(fleet, REQUESTS), counted(fleet, CACHED)
        (url,) = [url for url in after if after[url] > requests.get(url, 0.0)]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprob_error(tiny[1], prompt, choice["token_ids"], logprobs) < TOLERANCE
        return url, hits[url] - cached.get(url, 0.0), choice

    homes = {seed: ask(prompt, "1")[0] for seed, prompt in prompts.items()}
    for seed, home in homes.items():
        # events arrive beside the answer
        turn = [*prompts[seed], *prompt_of(5, 100 + seed)]
        asked = wait_for(lambda turn=turn: (a := ask(turn, "1"))[1] > 0 and a, 30.0, "request to a cached prefix")
        assert asked[0] == home
        assert asked[1] >= len(prompts[seed]) - BLOCK
    # what another version computed does not count
    assert ask([*prompts[0], 9], "2")[1] == 0


def test_an_engine_that_was_away_is_taken_for_empty(fleet: Fleet) -> None:
    router, engines = fleet.servers[Role.ROUTER, 0], [fleet.servers[Role.ENGINE, i] for i in range(2)]
    prompt = prompt_of(8 * BLOCK, 50)
    generate(router, NAME, prompt, cache_salt="9")
    for engine in engines:
        assert router.call(f"/remove_worker?url={engine.url}", {})[0] == 200
    status, _ = router.call("/inference/v1/generate", {"model": NAME, "token_ids": prompt, "sampling_params": {}})
    assert status == 503
    for engine in engines:
        assert router.call(f"/add_worker?url={engine.url}", {})[0] == 200
    before = sum(counted(fleet, CACHED).values())
    generate(router, NAME, prompt, cache_salt="9")
    assert sum(counted(fleet, CACHED).values()) == before
