"""The HTTP contract between orchestrator and engine: control, routed experts and load (`contract.py`)."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from contract import (
    GENERATE,
    LONG,
    MAX_MODEL_LEN,
    TOLERANCE,
    follow,
    label,
    prompt_of,
    settled,
)
from engine_helpers import SERVED_NAME, Server, decode_experts, forward, logprob_error, random_model

from hpcrl.network.generate_frames import MEDIA_TYPE
from hpcrl.rollouts.engines.client import EngineClient, Generation, SamplingParams


@pytest.fixture
def server(contract_server: Server) -> Server:
    return contract_server


def test_what_is_served(server: Server) -> None:
    assert server.get("/health")[0] == 200
    assert "version" in server.get("/version")[1]
    assert server.get("/get_world_size")[1] == {"world_size": 1}
    (card,) = server.get("/v1/models")[1]["data"]
    assert (card["id"], card["max_model_len"]) == (SERVED_NAME, MAX_MODEL_LEN)


def test_metrics_have_the_agreed_names(server: Server) -> None:
    before = server.metrics()
    server.generate(prompt_of(11, seed=501), max_tokens=5, ignore_eos=True)
    after = server.metrics()
    for name, amount in {
        "vllm:prompt_tokens_total": 11,
        "vllm:generation_tokens_total": 5,
        "vllm:request_success_total": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 4,
        "vllm:request_prompt_tokens_sum": 11,
        "vllm:request_generation_tokens_sum": 5,
    }.items():
        assert after[name] - before[name] == amount, name
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert after[name] == 0
    assert "vllm:num_preemptions_total" in after


@pytest.mark.parametrize("clear_cache", ["false", "true"])
def test_pause_keep_freezes_and_resume_continues(server: Server, pool: ThreadPoolExecutor, clear_cache: str) -> None:
    before = server.metrics()["vllm:num_preemptions_total"]
    tokens, future = follow(server, pool, f"keep-{clear_cache}")
    assert server.ok(f"/pause?mode=keep&clear_cache={clear_cache}") == {"status": "paused"}
    try:
        assert server.get("/is_paused")[1] == {"is_paused": True}
        frozen = settled(tokens)
        late = pool.submit(server.generate, prompt_of(5), max_tokens=2)
        time.sleep(0.2)
        assert len(tokens) == frozen < LONG
        assert not late.done()
    finally:
        assert server.ok("/resume") == {"status": "resumed"}
    assert server.get("/is_paused")[1] == {"is_paused": False}
    last = future.result()
    assert (len(tokens), last["finish_reason"]) == (LONG, "length")
    assert late.result()["choices"][0]["finish_reason"] in ("length", "stop")
    # with clear_cache, which is the default, the frozen requests lose their KV and are computed again
    assert server.metrics()["vllm:num_preemptions_total"] - before == (clear_cache == "true")


def test_pause_abort_ends_requests(server: Server, pool: ThreadPoolExecutor) -> None:
    tokens, future = follow(server, pool, "victim")
    server.ok("/pause?mode=abort")
    try:
        assert future.result(120)["finish_reason"] == "abort"
        assert len(tokens) < LONG
    finally:
        server.ok("/resume")
    assert server.generate([5], max_tokens=1)["choices"][0]["token_ids"]


def test_pause_wait_drains(server: Server, pool: ThreadPoolExecutor) -> None:
    tokens, future = follow(server, pool, "drained")
    server.ok("/pause?mode=wait")
    try:
        assert future.result(120)["finish_reason"] == "length"
        assert len(tokens) == LONG
        late = pool.submit(server.generate, prompt_of(5), max_tokens=2)
        time.sleep(0.2)
        assert not late.done()
    finally:
        server.ok("/resume")
    late.result()


def test_a_wrong_pause_mode_is_refused(server: Server) -> None:
    assert server.call("/pause?mode=sometimes")[0] == 400
    assert server.get("/is_paused")[1] == {"is_paused": False}


@pytest.mark.parametrize("path", ["/inference/v1/abort_requests", "/abort_requests"])
def test_requests_are_aborted_by_name(server: Server, pool: ThreadPoolExecutor, path: str) -> None:
    _, other = follow(server, pool, "two")
    _, victim = follow(server, pool, "one")
    server.ok(path, {"request_ids": ["generate-tokens-one", "generate-tokens-unknown"]})
    assert victim.result(120)["finish_reason"] == "abort"
    assert other.result()["finish_reason"] == "length"


def test_a_client_that_goes_away_frees_its_blocks(server: Server) -> None:
    server.wait_idle()
    body = {"model": SERVED_NAME, "token_ids": [5, 6], "sampling_params": {"ignore_eos": True}}
    for stream in (True, False):
        body["stream"] = stream
        server.timeout_s = 0.15 if not stream else 60.0
        try:
            if stream:
                with server.request("POST", GENERATE, body) as answer:
                    answer.readline()
            else:
                with pytest.raises(TimeoutError):
                    server.request("POST", GENERATE, {**body, "sampling_params": {"ignore_eos": True, "n": 16}})
        finally:
            server.timeout_s = 60.0
        server.wait_idle()
        assert server.metrics()["vllm:kv_cache_usage_perc"] == 0


def test_each_token_knows_its_weights(server: Server, pool: ThreadPoolExecutor) -> None:
    before = server.get("/weight_info")[1]["weight_version"]
    tokens, future = follow(server, pool, "versions")
    server.ok("/pause?mode=keep&clear_cache=false")
    try:
        label(server, "17")
        assert server.get("/weight_info")[1] == {"weight_version": "17"}
        frozen = settled(tokens)
    finally:
        server.ok("/resume")
    try:
        first, second = future.result()["weight_versions"]
        assert (first["version"], first["start"], first["end"]) == (before, 0, frozen)
        assert (second["version"], second["start"], second["end"]) == ("17", frozen, LONG)
        after = server.generate([5], max_tokens=2, ignore_eos=True)["choices"][0]["weight_versions"]
        assert after == [{"version": "17", "start": 0, "end": 2}]
    finally:
        label(server, before)


# -- routed experts ------------------------------------------------------------------------------------------------


def test_routed_experts_are_the_models(server: Server) -> None:
    """vLLM's CPU model runner has none of this; a correction of our plugin gives it."""
    prompt = prompt_of(70, seed=61)
    for start in (0, 0, 70):  # the second time the prompt comes from the cache
        choice = server.generate(prompt, max_tokens=9, ignore_eos=True, routed_experts_prompt_start=start)["choices"][0]
        experts = decode_experts(choice["routed_experts"])
        _, expected = forward(server.model, [*prompt, *choice["token_ids"]])
        assert experts.shape == (70 + 9 - 1 - start, 2, 2)
        assert experts.dtype == "uint8"
        assert (experts == expected[start:-1]).all()


def test_routed_experts_of_parts_are_those_of_the_whole(server: Server) -> None:
    """Joined, wherever they come: each part may have the rows of its tokens, or the last one all of them."""
    prompt = prompt_of(37, seed=62)
    for start in (0, 20, 36):
        sampling = {"max_tokens": 12, "seed": 4, "ignore_eos": True, "routed_experts_prompt_start": start}
        body = {"token_ids": prompt, "sampling_params": {**sampling, "stream_interval": 5}, "model": SERVED_NAME}
        chunks = [event["choices"][0] for event in server.stream(GENERATE, {**body, "stream": True})]
        tokens = [token for chunk in chunks for token in chunk["token_ids"]]
        rows = [decode_experts(chunk["routed_experts"]) for chunk in chunks if chunk["routed_experts"] is not None]
        _, expected = forward(server.model, [*prompt, *tokens])
        assert (np.concatenate(rows) == expected[start:-1]).all()
        known = 0
        for chunk in chunks:
            known += 0 if chunk["routed_experts"] is None else len(decode_experts(chunk["routed_experts"]))
            # never more than what was computed for the tokens so far
            sent = sum(len(other["token_ids"]) for other in chunks[: chunks.index(chunk) + 1])
            assert known <= len(prompt) + sent - 1 - start


def test_binary_answers_say_what_answers_in_text_do(server: Server) -> None:
    """To a client that takes them, as a whole and in parts; vLLM knows text alone, and is asked in the same way."""
    prompt = prompt_of(45, seed=63)
    before = server.get("/weight_info")[1]["weight_version"]
    label(server, "7")
    kind = MEDIA_TYPE if server.kind == "embedded" else "application/json"
    sampling = {"max_tokens": 9, "seed": 5, "temperature": 1.0, "logprobs": 1, "routed_experts_prompt_start": 12}
    text = server.generate(prompt, request={"cache_salt": "7"}, **sampling)["choices"][0]
    body = {"token_ids": prompt, "sampling_params": sampling, "model": SERVED_NAME}
    with server.request("POST", GENERATE, body, {"accept": f"{MEDIA_TYPE}, application/json"}) as answer:
        assert answer.headers["content-type"] == kind

    async def ask(interval: int | msgspec.UnsetType, *, rows: bool = True) -> Generation:
        params = SamplingParams(**sampling, stop_token_ids=[], stream_interval=interval)
        async with aiohttp.ClientSession() as session:
            client = EngineClient(session, name="engine-0", url=server.url)
            return await client.generate(prompt, params, cache_salt="7", session_id="s", timeout_s=60.0, rows=rows)

    try:
        answers = [asyncio.run(ask(interval)) for interval in (msgspec.UNSET, 4)]
        for interval in (msgspec.UNSET, 4):
            without = asyncio.run(ask(interval, rows=False))
            assert without.experts is None
            assert without.token_ids.tolist() == text["token_ids"]
    finally:
        label(server, before)
    for found in answers:
        assert found.token_ids.tolist() == text["token_ids"]
        assert found.logprobs == pytest.approx([entry["logprob"] for entry in text["logprobs"]["content"]], abs=1e-5)
        assert (set(found.versions.tolist()), found.finish_reason) == ({7}, text["finish_reason"])
        assert found.experts is not None
        assert (found.experts == decode_experts(text["routed_experts"])).all()


# -- load ----------------------------------------------------------------------------------------------------------


def test_more_requests_than_sequences(server: Server, pool: ThreadPoolExecutor) -> None:
    """All are answered, each as if it were alone."""
    lengths = [1 + 13 * i % 90 for i in range(48)]

    def one(i: int) -> float:
        prompt = prompt_of(lengths[i], seed=i)
        choice = server.generate(prompt, max_tokens=30, logprobs=0, ignore_eos=True)["choices"][0]
        assert len(choice["token_ids"]) == 30
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        with lock:
            return logprob_error(server.model, prompt, choice["token_ids"], values)

    lock = threading.Lock()
    assert max(pool.map(one, range(48))) < TOLERANCE


def test_the_tests_can_tell_models_apart(server: Server) -> None:
    """The tolerance is far below the distance to a model with other weights."""
    other = random_model(server.model.arch, seed=2)
    prompt = prompt_of(20)
    choice = server.generate(prompt, max_tokens=10, logprobs=0, seed=1)["choices"][0]
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprob_error(other, prompt, choice["token_ids"], values) > 100 * TOLERANCE
    assert torch.isfinite(torch.tensor(values)).all()
