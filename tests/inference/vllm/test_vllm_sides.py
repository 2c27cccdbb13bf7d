"""Prefill, decode and the router between them as real programs, started by the commands of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_helpers import forward, logprob_error, random_model
from sides_rollouts import NAME, follow_rollouts, prompt_of, take
from vllm_fleet import Fleet, generate

from hpcrl.config.plan import Role
from hpcrl.modeling.decoder import Decoder
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.sampling.known_rows import KnownRows

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]

TOLERANCE = 2e-3
SETTINGS = (
    "engine.replicas=1",
    "engine.kv_store=null",
    "engine.return_routed_experts=true",
    "engine.prefill={replicas: 1, nodes: 1}",
    "engine.decode={replicas: 1, nodes: 1}",
)


@pytest.fixture(scope="module")
def fleet(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("sides") / "run", tiny, *SETTINGS)
    try:
        fleet.start(Role.PREFILL, Role.DECODE)
        fleet.start(Role.ROUTER, timeout_s=120.0)
        yield fleet
    finally:
        fleet.stop()


def test_answers_are_those_of_one_model_and_prompts_come_from_prefill(fleet: Fleet, tiny: tuple[Path, Decoder]) -> None:
    """Greedy tokens and log-probabilities are those of a plain forward pass; decode has read the prompts' KV."""
    router, decode = fleet.servers[Role.ROUTER, 0], fleet.servers[Role.DECODE, 0]
    prefill, model = fleet.servers[Role.PREFILL, 0], tiny[1]
    before = decode.metrics()

    def one(seed: int) -> None:
        prompt = prompt_of(100 + 37 * seed, seed)
        choice = generate(router, NAME, prompt, session=f"s-{seed}", cache_salt="1")
        expected, _ = forward(model, [*prompt, *choice["token_ids"]])
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprob_error(model, prompt, choice["token_ids"], logprobs) < TOLERANCE
        assert [span["end"] for span in choice["weight_versions"]] == [24]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(8)))
    after = decode.metrics()
    lengths = sum(100 + 37 * seed for seed in range(8))
    hits = after["vllm:external_prefix_cache_hits_total"] - before.get("vllm:external_prefix_cache_hits_total", 0.0)
    assert hits >= lengths - 8 * 32, "decode has computed prompts itself"
    assert prefill.metrics()["vllm:prompt_tokens_total"] >= lengths
    # one token a request is how a prompt is asked for
    assert prefill.metrics()["vllm:generation_tokens_total"] == 8


def test_turns_of_a_rollout_go_on_where_they_were(fleet: Fleet, tiny: tuple[Path, Decoder]) -> None:
    router, model = fleet.servers[Role.ROUTER, 0], tiny[1]
    text = prompt_of(150, 77)
    for turn in range(3):
        choice = generate(router, NAME, text, session="turns", cache_salt="1")
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprob_error(model, text, choice["token_ids"], logprobs) < TOLERANCE
        text = [*text, *choice["token_ids"], *prompt_of(40, 100 + turn)]


@pytest.mark.parametrize("interval", [None, 5])
def test_experts_of_prompts_are_those_of_prefill(
    fleet: Fleet, tiny: tuple[Path, Decoder], interval: int | None
) -> None:
    """Two rollouts of one prompt, three turns each, whole answers and answers in parts: every row but the last is that
    of a plain forward pass, and decode has made none of the first prompt but the last."""
    if not (fleet.run.weights_dir / "v000001").exists():
        take(fleet, 1, *tiny)  # a version that is a number, as in a run
    counters = Counters()
    store = KnownRows(counters, block=32, limit_bytes=1 << 30, keep_versions=1)
    opening = prompt_of(170, 900 + (interval or 0))
    found = follow_rollouts(fleet, tiny[1], opening, (1, 2), store, interval=interval)
    tokens = sum(len(known) for known in found) - 2
    assert [known.tolist() for known in found] == [[True] * (len(known) - 1) + [False] for known in found]
    assert (counters.rows_answer, counters.rows_shared_prefix, counters.rows_unknown) == (tokens, 0, 0)
    # of the rest decode has computed the answers, and the last tokens of prompts
    assert counters.rows_prefill >= 2 * (len(opening) - 1)
    print(f"rows of {tokens} tokens: {counters.rows_prefill} of prefill, none unknown")


def test_both_sides_take_weights_and_a_new_salt_finds_no_old_prompt(fleet: Fleet, tiny: tuple[Path, Decoder]) -> None:
    """Weights are updated at each engine; a prompt that both sides know of the old version is computed anew."""
    router = fleet.servers[Role.ROUTER, 0]
    prompt = prompt_of(200, 55)
    generate(router, NAME, prompt, cache_salt="1")
    new = random_model(tiny[1].arch, seed=41)
    take(fleet, 2, tiny[0], new)
    choice = generate(router, NAME, prompt, cache_salt="2")
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprob_error(new, prompt, choice["token_ids"], logprobs) < TOLERANCE
    assert {span["version"] for span in choice["weight_versions"]} == {"2"}
