"""The HTTP contract between orchestrator and engine, run against the embedded engine or a real vLLM.

By default the embedded engine is started. With ``HPCRL_TEST_ENGINE=vllm`` the same tests run against vLLM (of
``HPCRL_VLLM_PYTHON``, else of ``.venv-vllm``): what holds here, an orchestrator may rely on.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import (
    SERVED_NAME,
    Server,
    decode_experts,
    embedded_command,
    forward,
    logprob_error,
    random_model,
    start_server,
)
from vllm_environment import SKIPPED, VLLM_PYTHON

from hpcrl.modeling.qwen3_moe import Qwen3Moe

KIND = os.environ.get("HPCRL_TEST_ENGINE", "embedded")
EMBEDDED = KIND == "embedded"
MAX_MODEL_LEN = 1024
#: tokens of a request that is still running when something is done to it
LONG = 1000
MAX_NUM_SEQS = 16
BLOCK = 32
#: both compute in float32, but not in the same order
TOLERANCE = 1e-4 if EMBEDDED else 2e-3
EOS = 2
FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), "--block-size", str(BLOCK)),
    *("--dtype", "float32", "--seed", "0", "--enable-scale-out", "--enforce-eager", "--enable-prompt-tokens-details"),
)
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def server(tiny: tuple[Path, Qwen3Moe], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path, model = tiny
    log = tmp_path_factory.mktemp("log") / "server.log"
    if EMBEDDED:
        command = embedded_command(*FLAGS, "--enable-return-routed-experts")
        running = start_server(command, path, model, log)
    else:
        if VLLM_PYTHON is None:
            pytest.skip(f"{SKIPPED}: python3 tools/bootstrap.py --vllm, or HPCRL_VLLM_PYTHON")
        python = str(VLLM_PYTHON)
        running = start_server(
            [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", SERVED_NAME, *FLAGS),
                *("--enable-return-routed-experts", "--weight-transfer-config", '{"backend": "hpcrl"}'),
            ],
            path,
            model,
            log,
            kind="vllm",
            ready_s=1500,
            environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "HPCRL_VLLM_PLUGIN": "1"},
        )
    running.call("/v1/completions", {"prompt": [1], "max_tokens": 1, "model": SERVED_NAME})  # warm up
    yield running
    running.stop()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(7, 103) for _ in range(length)]


def in_background(pool: ThreadPoolExecutor, server: Server, request: dict[str, Any], **sampling: Any) -> Any:
    return pool.submit(server.generate, prompt_of(20, seed=99), request=request, **sampling)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as executor:
        yield executor


# -- the token endpoint ------------------------------------------------------------------------------------------


def test_generate_answers_in_the_agreed_shape(server: Server) -> None:
    answer = server.generate(prompt_of(5), max_tokens=3, logprobs=1, ignore_eos=True, request={"request_id": "abc"})
    assert answer["request_id"] == "generate-tokens-abc"
    assert answer["model"] == SERVED_NAME
    assert answer["output_mode"] == "tokens"
    assert {k: answer["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
    }
    for absent in ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "metrics"):
        assert answer[absent] is None
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["sampling_mask"] is None
    assert len(choice["token_ids"]) == 3
    (span,) = choice["weight_versions"]
    assert (span["start"], span["end"]) == (0, 3)
    assert span["version"] == server.get("/weight_info")[1]["weight_version"]
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert set(entry) == {"token_id", "logprob", "rank", "top_logprobs"}
        assert entry["token_id"] == token
        assert entry["logprob"] < 0
        assert entry["rank"] >= 1


@pytest.mark.parametrize("length", [1, 31, 32, 33, 300])
def test_log_probabilities_are_the_models(server: Server, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    answer = server.generate(prompt, max_tokens=20, logprobs=0, seed=1)
    choice = answer["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprob_error(server.model, prompt, choice["token_ids"], logprobs) < TOLERANCE


def test_log_probabilities_are_raw_by_default(server: Server) -> None:
    """Temperature and top-k change what is sampled, not the reported log-probability."""
    prompt = prompt_of(10)
    answer = server.generate(prompt, max_tokens=20, logprobs=0, temperature=0.5, top_k=5, seed=1)
    choice = answer["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprob_error(server.model, prompt, choice["token_ids"], logprobs) < TOLERANCE
    assert max(entry["rank"] for entry in choice["logprobs"]["content"]) <= 5


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_top_logprobs_begin_with_the_sampled_token(server: Server, count: int) -> None:
    prompt = prompt_of(10)
    choice = server.generate(prompt, max_tokens=10, logprobs=count, seed=3)["choices"][0]
    expected, _ = forward(server.model, [*prompt, *choice["token_ids"]])
    for i, entry in enumerate(choice["logprobs"]["content"]):
        top = entry["top_logprobs"]
        assert len(top) == max(count, 1)
        assert {k: top[0][k] for k in ("token_id", "logprob", "rank")} == {
            k: entry[k] for k in ("token_id", "logprob", "rank")
        }
        best = expected[len(prompt) - 1 + i].topk(max(count, 1)).indices.tolist()
        others = [one["token_id"] for one in top[1:]]
        assert others == [token for token in best if token != entry["token_id"]][: len(others)]
        for one in top:
            row = expected[len(prompt) - 1 + i]
            assert one["rank"] == int((row > row[one["token_id"]]).sum()) + 1


def test_without_logprobs_none_are_sent(server: Server) -> None:
    assert server.generate(prompt_of(5), max_tokens=2)["choices"][0]["logprobs"] is None


def test_greedy_is_the_most_likely(server: Server) -> None:
    prompt = prompt_of(20)
    tokens = server.generate(prompt, max_tokens=15, temperature=0, ignore_eos=True)["choices"][0]["token_ids"]
    expected, _ = forward(server.model, [*prompt, *tokens])
    assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_a_seed_reproduces_under_any_load(server: Server, pool: ThreadPoolExecutor) -> None:
    def one(_: int) -> list[int]:
        answer = server.generate(prompt_of(12), max_tokens=25, seed=11, ignore_eos=True)
        return list(answer["choices"][0]["token_ids"])

    alone = one(0)
    noise = [in_background(pool, server, {}, max_tokens=60, ignore_eos=True) for _ in range(10)]
    assert all(tokens == alone for tokens in pool.map(one, range(5)))
    for future in noise:
        future.result()
    assert server.generate(prompt_of(12), max_tokens=25, seed=12, ignore_eos=True)["choices"][0]["token_ids"] != alone


def test_n_choices_differ_and_are_seeded_one_by_one(server: Server) -> None:
    answer = server.generate(prompt_of(8), n=4, max_tokens=20, seed=5, ignore_eos=True)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 4
    assert answer["usage"]["completion_tokens"] == 80
    third = server.generate(prompt_of(8), max_tokens=20, seed=7, ignore_eos=True)["choices"][0]
    assert third["token_ids"] == choices[2]["token_ids"]


def test_end_of_sequence_and_stop_tokens(server: Server) -> None:
    prompt = prompt_of(9)
    free = server.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)["choices"][0]["token_ids"]
    stop = free[5]
    at = free.index(stop) + 1
    choice = server.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=[stop])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", stop, free[:at])
    later = server.generate(
        prompt, max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=[stop], min_tokens=at + 2
    )["choices"][0]
    assert stop not in later["token_ids"][: at + 2]
    answers = server.generate(prompt, n=8, max_tokens=400, seed=1)["choices"]
    ended = [choice for choice in answers if choice["finish_reason"] == "stop"]
    assert ended, "eight sequences of 400 tokens without an end of sequence"
    for choice in ended:
        assert choice["stop_reason"] is None
        assert choice["token_ids"][-1] == EOS
        assert EOS not in choice["token_ids"][:-1]


def test_without_max_tokens_the_context_is_the_limit(server: Server) -> None:
    choice = server.generate(prompt_of(MAX_MODEL_LEN - 30), ignore_eos=True)["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (30, "length")
    long = server.generate(prompt_of(MAX_MODEL_LEN - 10), ignore_eos=True, max_tokens=50)["choices"][0]
    assert (len(long["token_ids"]), long["finish_reason"]) == (10, "length")


def test_prompt_token_ids_come_back_on_request(server: Server) -> None:
    answer = server.generate(prompt_of(6), max_tokens=1, request={"return_token_ids": True})
    assert answer["prompt_token_ids"] == prompt_of(6)


def test_generate_streams_what_it_answers_whole(server: Server) -> None:
    sampling = {"max_tokens": 12, "seed": 4, "logprobs": 1, "ignore_eos": True}
    whole = server.generate(prompt_of(7), **sampling)["choices"][0]
    body = {"token_ids": prompt_of(7), "sampling_params": sampling, "stream": True, "model": SERVED_NAME}
    events = list(server.stream(GENERATE, {**body, "stream_options": {"include_usage": True}}))
    chunks = [event["choices"][0] for event in events if event["choices"]]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    streamed = [entry["logprob"] for chunk in chunks for entry in chunk["logprobs"]["content"]]
    assert streamed == pytest.approx([entry["logprob"] for entry in whole["logprobs"]["content"]], abs=TOLERANCE)
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert [chunk["weight_versions"] is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["weight_versions"] == whole["weight_versions"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12


def test_a_stream_has_parts_of_the_size_that_was_asked_for(server: Server) -> None:
    """The first has one token; log-probabilities are in each, versions in the last alone."""
    sampling = {"max_tokens": 12, "seed": 4, "logprobs": 1, "ignore_eos": True}
    whole = server.generate(prompt_of(7), **sampling)["choices"][0]
    body = {"token_ids": prompt_of(7), "sampling_params": {**sampling, "stream_interval": 5}, "model": SERVED_NAME}
    chunks = [event["choices"][0] for event in server.stream(GENERATE, {**body, "stream": True})]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    assert [len(chunk["token_ids"]) for chunk in chunks] == [1, 5, 5, 1]
    assert [len(chunk["logprobs"]["content"]) for chunk in chunks] == [1, 5, 5, 1]
    assert [chunk["weight_versions"] is not None for chunk in chunks] == [False, False, False, True]


def test_stop_strings_end_a_token_request(server: Server) -> None:
    prompt = prompt_of(9)
    free = server.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)["choices"][0]["token_ids"]
    completion = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = server.ok("/v1/completions", completion)["choices"][0]["text"]
    stop = text[6:8]
    answer = server.ok("/v1/completions", {**completion, "stop": stop, "return_token_ids": True})["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (text[: text.index(stop)], "stop", stop)
    choice = server.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True, stop=[stop])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == answer["token_ids"] == free[: len(choice["token_ids"])]
    assert choice["weight_versions"][-1]["end"] == len(choice["token_ids"])


BAD = {
    "empty prompt": ({"token_ids": []}, {}),
    "token out of vocabulary": ({"token_ids": [1, 5000]}, {}),
    "negative token": ({"token_ids": [-1]}, {}),
    "prompt as long as the context": ({"token_ids": [1] * MAX_MODEL_LEN}, {}),
    "prompt longer than the context": ({"token_ids": [1] * (MAX_MODEL_LEN + 100)}, {}),
    "no token_ids": ({"token_ids": None}, {}),
    "text for token_ids": ({"token_ids": "hello"}, {}),
    "empty salt": ({"cache_salt": ""}, {}),
    "salt with a slash": ({"cache_salt": "a/b"}, {}),
    "long salt": ({"cache_salt": "x" * 129}, {}),
    "temperature": ({}, {"temperature": -1}),
    "hot": ({}, {"temperature": 3}),
    "top_p": ({}, {"top_p": 0}),
    "top_k": ({}, {"top_k": -5}),
    "min_p": ({}, {"min_p": 2}),
    "max_tokens": ({}, {"max_tokens": 0}),
    "min_tokens": ({}, {"max_tokens": 2, "min_tokens": 3}),
    "n": ({}, {"n": 0}),
    "more choices than sequences": ({}, {"n": MAX_NUM_SEQS + 1}),
    "several greedy choices": ({}, {"n": 2, "temperature": 0}),
    "stop token": ({}, {"stop_token_ids": [5000]}),
    "logprobs": ({}, {"logprobs": -2}),
    "empty stop string": ({}, {"stop": [""]}),
    "number as text": ({}, {"max_tokens": "many"}),
    "more candidates than allowed": ({}, {"logprobs": 21}),
    "all candidates": ({}, {"logprobs": -1}),
    "prompt_logprobs below -1": ({}, {"prompt_logprobs": -2}),
    "route start behind the prompt": ({}, {"routed_experts_prompt_start": 4}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_with_a_reason(server: Server, name: str) -> None:
    changes, sampling = BAD[name]
    body = {"model": SERVED_NAME, "token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 2, **sampling}, **changes}
    body = {key: value for key, value in body.items() if value is not None}
    status, answer = server.call(GENERATE, body)
    assert status == 400, answer
    assert answer["error"]["code"] == 400
    assert answer["error"]["message"]
    assert answer["error"]["type"]


def test_other_errors(server: Server) -> None:
    status, answer = server.call(GENERATE, {"model": "other", "token_ids": [1], "sampling_params": {}})
    assert (status, answer["error"]["code"]) == (404, 404)
    assert "other" in answer["error"]["message"]
    assert server.call(GENERATE, b"{nonsense")[0] == 400
    assert server.get("/nowhere")[0] == 404
    assert server.call(GENERATE, method="GET")[0] == 405


# -- the prefix cache ----------------------------------------------------------------------------------------------


def cached_tokens(server: Server, prompt: list[int], **request: Any) -> int:
    """Prompt tokens found in the cache, by the answer and by the counters."""
    before = server.metrics()
    answer = server.generate(prompt, max_tokens=1, request=request)
    after = server.metrics()
    hits = after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    queries = after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"]
    details = answer["usage"]["prompt_tokens_details"]
    assert (details or {}).get("cached_tokens", 0) in (hits, None)
    assert queries == len(prompt)
    return int(hits)


def test_prefixes_are_shared_under_one_salt_only(server: Server) -> None:
    prompt = prompt_of(200, seed=77)
    expected = 200 // BLOCK * BLOCK
    assert cached_tokens(server, prompt, cache_salt="v1") == 0
    assert cached_tokens(server, prompt, cache_salt="v1") == expected
    assert cached_tokens(server, prompt, cache_salt="v2") == 0
    assert cached_tokens(server, prompt) == 0
    assert cached_tokens(server, prompt) == expected
    assert cached_tokens(server, [*prompt[:100], *prompt_of(50, seed=78)]) == 96
    # the last token is always computed
    assert cached_tokens(server, prompt[:192]) == 160


def test_answers_do_not_depend_on_the_cache(server: Server) -> None:
    prompt = prompt_of(170, seed=79)
    for _ in range(2):
        choice = server.generate(prompt, max_tokens=10, logprobs=0, seed=2, request={"cache_salt": "z"})["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprob_error(server.model, prompt, choice["token_ids"], logprobs) < TOLERANCE


def test_resetting_the_cache_forgets_prefixes(server: Server) -> None:
    prompt = prompt_of(100, seed=80)
    cached_tokens(server, prompt)
    server.wait_idle()
    assert server.ok("/reset_prefix_cache") == {"success": True}
    assert cached_tokens(server, prompt) == 0


# -- the text endpoints --------------------------------------------------------------------------------------------


def test_completions_of_text_and_of_its_tokens_are_equal(server: Server) -> None:
    settings = {"model": SERVED_NAME, "max_tokens": 10, "seed": 3, "logprobs": 2, "return_token_ids": True}
    text = server.ok("/v1/completions", {**settings, "prompt": "Hello, you"})
    (choice,) = text["choices"]
    assert text["object"] == "text_completion"
    assert text["id"].startswith("cmpl-")
    assert len(choice["prompt_token_ids"]) == 10
    tokens = server.ok("/v1/completions", {**settings, "prompt": choice["prompt_token_ids"]})
    assert tokens["choices"][0]["token_ids"] == choice["token_ids"]
    assert tokens["choices"][0]["text"] == choice["text"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(choice["token_ids"])
    assert logprobs["text_offset"][0] == 0
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert 2 <= len(top) <= 3
        assert top[token] == value
    error = logprob_error(
        server.model, choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"]
    )
    assert error < TOLERANCE


def test_completions_of_several_prompts(server: Server) -> None:
    body = {"model": SERVED_NAME, "prompt": [[10, 11], [12, 13, 14]], "max_tokens": 3, "n": 2, "ignore_eos": True}
    answer = server.ok("/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 12


def test_completions_stream(server: Server) -> None:
    body = {"model": SERVED_NAME, "prompt": "abc", "max_tokens": 15, "seed": 8, "return_token_ids": True, "logprobs": 0}
    whole = server.ok("/v1/completions", body)["choices"][0]
    events = list(server.stream("/v1/completions", {**body, "stream": True}))
    chunks = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    assert [chunk["prompt_token_ids"] for chunk in chunks if chunk["prompt_token_ids"]] == [whole["prompt_token_ids"]]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    offsets = [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]


def test_prompt_log_probabilities(server: Server) -> None:
    prompt = prompt_of(40, seed=3)
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 1}
    for _ in range(2):  # a cached prefix must not shorten them
        scores = server.ok("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        expected, _ = forward(server.model, prompt)
        assert len(scores) == 40
        assert scores[0] is None
        for i, entry in enumerate(scores[1:]):
            own = entry[str(prompt[i + 1])]
            assert own["logprob"] == pytest.approx(float(expected[i, prompt[i + 1]]), abs=TOLERANCE)
            assert entry[str(int(expected[i].argmax()))]["rank"] == 1


def test_chat_renders_the_template(server: Server) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 12, "seed": 6, "return_token_ids": True}
    answer = server.ok("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2})
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    # <|system|>Add.<|end|><|user|>1+1<|end|><|assistant|>
    assert len(answer["prompt_token_ids"]) == 1 + 4 + 1 + 1 + 3 + 1 + 1
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprob_error(server.model, answer["prompt_token_ids"], choice["token_ids"], values) < TOLERANCE
    assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
    same = server.generate(answer["prompt_token_ids"], max_tokens=12, seed=6)["choices"][0]
    assert same["token_ids"] == choice["token_ids"]
    events = list(server.stream("/v1/chat/completions", {**body, "stream": True}))
    chunks = [event["choices"][0] for event in events if event["choices"]]
    assert events[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["delta"]["role"] == "assistant"
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == choice["message"]["content"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]


def test_chat_limits(server: Server) -> None:
    messages = [{"role": "user", "content": "x" * 20}]
    body = {"model": SERVED_NAME, "messages": messages, "ignore_eos": True}
    short = server.ok("/v1/chat/completions", {**body, "max_completion_tokens": 3})
    assert short["usage"]["completion_tokens"] == 3
    whole = server.ok("/v1/chat/completions", body)
    assert whole["usage"]["total_tokens"] == MAX_MODEL_LEN
    # the context cuts what is asked for, a prompt that leaves no room is refused
    cut = server.ok("/v1/chat/completions", {**body, "max_tokens": MAX_MODEL_LEN})
    assert cut["usage"]["total_tokens"] == MAX_MODEL_LEN
    completion = {
        "model": SERVED_NAME,
        "prompt": [8] * (MAX_MODEL_LEN - 12),
        "max_tokens": 50,
        "ignore_eos": True,
    }
    assert server.ok("/v1/completions", completion)["usage"]["completion_tokens"] == 12
    assert server.call("/v1/completions", {**completion, "prompt": [8] * MAX_MODEL_LEN})[0] == 400
    assert server.call("/v1/completions", {"model": SERVED_NAME, "max_tokens": 2})[0] == 400


# -- control -------------------------------------------------------------------------------------------------------


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


def follow(server: Server, pool: ThreadPoolExecutor, name: str) -> tuple[list[int], Any]:
    """Stream a long request in the background; returns the growing token list and the future of its last chunk."""
    tokens: list[int] = []

    def run() -> Any:
        body = {
            "model": SERVED_NAME,
            "token_ids": prompt_of(10, seed=5),
            "sampling_params": {"max_tokens": LONG, "ignore_eos": True},
            "stream": True,
            "request_id": name,
        }
        last = None
        for event in server.stream(GENERATE, body):
            for choice in event["choices"]:
                tokens.extend(choice["token_ids"])
                last = choice
        return last

    future = pool.submit(run)
    server.wait_for(lambda: len(tokens) >= 3 or future.done(), "the first tokens")
    return tokens, future


@pytest.mark.parametrize("clear_cache", ["false", "true"])
def test_pause_keep_freezes_and_resume_goes_on(server: Server, pool: ThreadPoolExecutor, clear_cache: str) -> None:
    before = server.metrics()["vllm:num_preemptions_total"]
    tokens, future = follow(server, pool, f"keep-{clear_cache}")
    assert server.ok(f"/pause?mode=keep&clear_cache={clear_cache}") == {"status": "paused"}
    try:
        assert server.get("/is_paused")[1] == {"is_paused": True}
        time.sleep(0.1)
        frozen = len(tokens)
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
        assert future.result(10)["finish_reason"] == "abort"
        assert len(tokens) < LONG
    finally:
        server.ok("/resume")
    assert server.generate([5], max_tokens=1)["choices"][0]["token_ids"]


def test_pause_wait_drains(server: Server, pool: ThreadPoolExecutor) -> None:
    tokens, future = follow(server, pool, "drained")
    server.ok("/pause?mode=wait")
    try:
        assert future.result(30)["finish_reason"] == "length"
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
    assert victim.result(10)["finish_reason"] == "abort"
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
        server.ok("/update_weight_version", {"new_version": "17"})
        assert server.get("/weight_info")[1] == {"weight_version": "17"}
        time.sleep(0.1)
        frozen = len(tokens)
    finally:
        server.ok("/resume")
    try:
        first, second = future.result()["weight_versions"]
        assert (first["version"], first["start"], first["end"]) == (before, 0, frozen)
        assert (second["version"], second["start"], second["end"]) == ("17", frozen, LONG)
        after = server.generate([5], max_tokens=2, ignore_eos=True)["choices"][0]["weight_versions"]
        assert after == [{"version": "17", "start": 0, "end": 2}]
    finally:
        server.ok("/update_weight_version", {"new_version": before})


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
