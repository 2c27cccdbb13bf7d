"""The HTTP contract between orchestrator and engine: the token endpoint and the prefix cache (`contract.py`)."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from contract import (
    BLOCK,
    EOS,
    GENERATE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    TOLERANCE,
    in_background,
    prompt_of,
)
from engine_helpers import SERVED_NAME, Server, forward, logprob_error

#: control tokens have the ids below
SPECIAL = 7


@pytest.fixture
def server(contract_server: Server) -> Server:
    return contract_server


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
    assert choice["routed_experts"] is not None
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    assert len(rows) == len(prompt) + len(choice["token_ids"]) - 1
    body = {"token_ids": prompt, "model": SERVED_NAME, "stream": True}
    sampling = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": [stop], "logprobs": 1}
    chunks = [event["choices"][0] for event in server.stream(GENERATE, {**body, "sampling_params": sampling})]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]
    assert sum(len(chunk["logprobs"]["content"]) for chunk in chunks) == len(choice["token_ids"])
    assert chunks[-1]["finish_reason"] == "stop"


def test_stop_strings_are_looked_for_among_control_tokens_on_request(server: Server) -> None:
    """A conversation asks so: what a template writes as a control token may end a turn by its text."""
    prompt, asked = prompt_of(9), {"max_tokens": 400, "seed": 1, "stop": ["<|"], "ignore_eos": True}
    shown = server.generate(prompt, **asked, skip_special_tokens=False)["choices"][0]
    assert shown["finish_reason"] == "stop"
    assert shown["token_ids"][-1] < SPECIAL
    assert not [token for token in shown["token_ids"][:-1] if token < SPECIAL]


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_what_leaves_one_token_over_is_greedy(server: Server, truncation: dict[str, float]) -> None:
    greedy = server.generate(prompt_of(9), max_tokens=20, temperature=0, ignore_eos=True)["choices"][0]
    drawn = server.generate(prompt_of(9), max_tokens=20, seed=3, ignore_eos=True, **truncation)["choices"][0]
    assert drawn["token_ids"] == greedy["token_ids"]


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
