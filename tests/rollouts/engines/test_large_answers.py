"""Large answers and long conversations: each byte is read once, and beside the event loop where there are many."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from numpy.typing import NDArray
from stub_engine import EOS, npy

from hpcrl.network import routed_experts_reference
from hpcrl.rollouts.core import token_sequence
from hpcrl.rollouts.core.prompts import EncodedTokens, binary_ids, encode_ids
from hpcrl.rollouts.core.token_sequence import TokenSequence
from hpcrl.rollouts.engines import answers
from hpcrl.rollouts.engines import rows as rows_module
from hpcrl.rollouts.engines.answers import AnswerReader, EngineProtocolError, SamplingParams
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.partial_generation import PartialGeneration

PARAMS = SamplingParams(temperature=1.0, max_tokens=8, seed=1, stop_token_ids=[EOS], routed_experts_prompt_start=0)


def reader(prompt: int = 1) -> AnswerReader:
    return AnswerReader("engine-0", prompt, PARAMS, lambda tokens, scores, rows: None)


def whole(own: AnswerReader, data: bytes | memoryview) -> answers.Generation:
    part = own.read(data)
    own.take(part)
    return own.generation(part)


def choice(rows: str | None) -> bytes:
    text = {
        "token_ids": [5, EOS],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "routed_experts": rows,
    }
    return msgspec.json.encode({"choices": [text]})


def rows_of(count: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, 2, width), np.uint8)


@pytest.mark.parametrize("width", [1, 2, 3, 64])
def test_rows_are_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(routed_experts_reference, "_PIECE", 16)
    rows = rows_of(2, width)
    for data in (choice(npy(rows)), choice(npy(rows)).replace(b"/", b"\\/")):
        own = reader(prompt=1)
        assert (whole(own, data).experts == rows).all()


def test_rows_that_are_missing_or_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reader().read(choice(None)).rows is None
    text = npy(rows_of(2, 8))
    for broken in (text[:-2], text.replace("A", "!", 1), "AAAA"):
        with pytest.raises(EngineProtocolError, match="cannot be read"):
            whole(reader(), choice(broken))


@pytest.fixture
async def engine() -> AsyncIterator[tuple[str, list[bytes]]]:
    """An engine that sends what it is told to, as events or as a whole."""
    answer: list[bytes] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.Response(body=answer[0])
        response = web.StreamResponse()
        await response.prepare(request)
        for data in answer:
            await response.write(b"data: " + data + b"\n\n")
        return response

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", answer  # type: ignore[attr-defined]
    await runner.cleanup()


@pytest.mark.parametrize("interval", [msgspec.UNSET, 64])
async def test_large_answers_are_decoded_in_a_thread(
    engine: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch, interval: Any
) -> None:
    threads: list[int] = []
    decode = AnswerReader.read

    def recorded(self: AnswerReader, data: bytes) -> answers.AnswerPart:
        threads.append(threading.get_ident())
        return decode(self, data)

    monkeypatch.setattr(AnswerReader, "read", recorded)
    url, answer = engine
    params = msgspec.structs.replace(PARAMS, stream_interval=interval)
    async with aiohttp.ClientSession() as http:
        client = EngineClient(http, name="engine-0", url=url)
        for width, beside in ((8, False), (200_000, True)):
            rows = rows_of(2, width)
            answer[:] = [choice(npy(rows))]
            found = await client.generate([7], params, cache_salt="0", session_id="s", timeout_s=30.0)
            assert found.experts is not None
            assert (found.experts == rows).all()
            assert (threads.pop() != threading.get_ident()) is beside


async def test_rows_of_small_parts_are_decoded_once_and_in_a_thread(
    engine: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is small, and is read where it arrives; rows of all of them are many bytes."""
    threads: list[int] = []
    decode = rows_module.EncodedRows.decoded

    def recorded(self: rows_module.EncodedRows) -> NDArray[Any]:
        threads.append(threading.get_ident())
        return decode(self)

    monkeypatch.setattr(rows_module.EncodedRows, "decoded", recorded)
    url, answer = engine
    rows, parts = rows_of(64, 8000), 64
    end = msgspec.json.decode(choice(None))["choices"][0]
    answer[:] = []
    for number in range(parts):
        part = {
            "token_ids": [5],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "routed_experts": npy(rows[number : number + 1]),
        }
        if number == parts - 1:
            spans = [{"version": "3", "start": 0, "end": parts}]
            part |= {"finish_reason": end["finish_reason"], "weight_versions": spans}
        answer.append(msgspec.json.encode({"choices": [part]}))
    assert max(map(len, answer)) < rows_module.LARGE_BYTES < rows.nbytes
    told: list[int] = []
    async with aiohttp.ClientSession() as http:
        found = await EngineClient(http, name="engine-0", url=url).generate(
            [7],
            msgspec.structs.replace(PARAMS, stream_interval=1, max_tokens=parts),
            cache_salt="0",
            session_id="s",
            timeout_s=30.0,
            on_part=lambda tokens, scores, part: told.append(0 if part is None else len(part)),
        )
    assert found.experts is not None
    assert (found.experts == rows).all()
    assert told == [1] * (parts - 1)
    assert len(threads) == parts
    assert threading.get_ident() not in threads


async def test_what_kept_parts_had_is_decoded_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is lost: to go on from its tokens needs to know how many rows there are, and none of them."""
    rows = rows_of(6, 2000)
    monkeypatch.setattr(rows_module.EncodedRows, "decoded", lambda self: pytest.fail("decoded too early"))
    params = msgspec.structs.replace(PARAMS, max_tokens=32)
    partial = PartialGeneration([7], params)
    partial.request(lambda: 3)
    for first in range(0, 6, 2):
        encoded = rows_module.EncodedRows(memoryview(msgspec.json.encode(npy(rows[first : first + 2]))))
        partial.receive([5, 6], [-0.5, -0.5], encoded)
    assert partial.keep() == 6
    _, again = partial.request(lambda: 3)
    assert again.routed_experts_prompt_start == 6
    monkeypatch.undo()
    rest = answers.Generation([7], [-0.5], [3], "length", experts=rows[:0])
    assert partial.row_bytes(rest) > rows.nbytes
    assert (partial.whole(rest).experts == rows).all()
    text = npy(rows)
    damaged = rows_module.EncodedRows(memoryview(msgspec.json.encode(text[:-8] + "!" + text[-7:])))
    partial.receive([5] * 6, [-0.5] * 6, damaged)
    partial.keep()
    with pytest.raises(EngineProtocolError, match="of an engine that was lost cannot be read"):
        partial.whole(rest)


@pytest.mark.parametrize("bad", ["dtype", "shape"])
def test_parts_that_differ_are_refused_or_widened(bad: str) -> None:
    one, two = rows_of(2, 3), rows_of(2, 3 if bad == "dtype" else 4).astype(np.int16)
    if bad == "dtype":
        joined = rows_module.join_rows([one, None, two])
        assert joined is not None
        assert joined.dtype == np.int16
        assert (joined == [*one, *two]).all()
    else:
        with pytest.raises(ValueError, match="differ in layers"):
            rows_module.join_rows([one, two])


def test_a_turn_encodes_what_is_new_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counted(token_ids: list[int]) -> bytes:
        encoded.append(len(token_ids))
        return encode_ids(token_ids)

    monkeypatch.setattr(token_sequence, "encode_ids", counted)
    tokens, rng, whole = TokenSequence(), np.random.default_rng(1), list[int]()
    for turn in range(40):
        said, sampled = (rng.integers(0, 150_000, rng.integers(0, 90), np.int32) for _ in range(2))
        tokens.append_said(said)
        whole += said.tolist()
        assert msgspec.json.decode(tokens.encoded.raw) == whole
        assert len(tokens.encoded) == len(tokens) == len(whole)
        tokens.append_sampled(sampled, [-0.5] * len(sampled), [turn] * len(sampled))
        whole += sampled.tolist()
        binary = EncodedTokens(tokens.encoded.token_ids, pytest.fail)
        assert np.frombuffer(binary_ids(binary), "<i4").tolist() == whole
    assert sum(encoded) == len(whole) - len(sampled) > 2000
    token_ids, kinds, logprobs, versions = tokens.arrays(len(tokens))
    assert token_ids.tolist() == whole
    assert (logprobs == np.where(kinds == 1, np.float32(-0.5), 0.0)).all()
    assert versions[kinds == 1].max() == 39
    assert tokens.end_of_sampled() == int(np.flatnonzero(kinds)[-1]) + 1
    assert TokenSequence().end_of_sampled() == 0


def test_a_prompt_stays_what_it_was_when_the_conversation_continues() -> None:
    tokens = TokenSequence()
    tokens.append_said(np.arange(5, dtype=np.int32))
    prompt = tokens.encoded
    tokens.append_said(np.arange(5, 2000, dtype=np.int32))
    assert msgspec.json.decode(tokens.encoded.raw) == list(range(2000))
    assert msgspec.json.decode(prompt.raw) == prompt.token_ids.tolist() == list(range(5))


@pytest.mark.parametrize("prompt", [[], [3, 4]])
def test_the_rest_of_an_answer_follows_an_encoded_prompt(prompt: list[int]) -> None:
    partial = PartialGeneration(EncodedTokens(np.array(prompt, np.int32), lambda: encode_ids(prompt)), PARAMS)
    partial.request(lambda: 2)
    partial.receive(np.array([10, 11], np.int32), np.array([-0.5, -0.6], np.float32))
    partial.keep()
    tokens, params = partial.request(lambda: 2)
    assert isinstance(tokens, EncodedTokens)
    assert msgspec.json.decode(tokens.raw) == [*prompt, 10, 11] == tokens.token_ids.tolist()
    assert (len(tokens), params.max_tokens) == (len(prompt) + 2, 6)
