"""The HTTP contract between orchestrator and engine: completions and chat (`contract.py`)."""

from __future__ import annotations

import pytest
from contract import (
    MAX_MODEL_LEN,
    TOLERANCE,
    prompt_of,
)
from engine_helpers import SERVED_NAME, Server, forward, logprob_error


@pytest.fixture
def server(contract_server: Server) -> Server:
    return contract_server


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
