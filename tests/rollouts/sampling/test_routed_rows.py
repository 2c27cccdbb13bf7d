"""Experts of tokens from engines to the dock: one row a token, over turns, lost engines and missing rows."""

from __future__ import annotations

import base64
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from harness import make_recipe, make_run, running
from numpy.typing import NDArray
from stub_engine import EOS, StubEngine, encode, npy

from hpcrl.dock.columns import encode_columns
from hpcrl.dock.routes import RoutedExperts, exact_dtype, joined
from hpcrl.dock.wire import BatchShard, BatchStats, MicroBatch, decode_shard, encode_shard
from hpcrl.fs import write_json
from hpcrl.inference.kept_rows import KeptRows
from hpcrl.models.arch import Qwen3MoeArch
from hpcrl.models.tokenizer import ChatTokenizer, write_character_tokenizer
from hpcrl.rollouts import orchestrator
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines.client import EngineClient, EngineProtocolError, Generation, SamplingParams
from hpcrl.rollouts.engines.partial_generation import PartialGeneration
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.engines.rows import read_rows
from hpcrl.rollouts.environments import Outcome
from hpcrl.rollouts.records import Rollout, decode_rollout, encode_rollout
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.rendering import Transcript
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsRows, RoutedExpertsSettings
from hpcrl.rollouts.saved_turns import SavedTurn, TurnKeeper
from hpcrl.rollouts.telemetry.counters import Counters

LAYERS, WIDTH, EXPERTS = 3, 2, 8
USER = ({"role": "user", "content": "1+1"},)
TOOL = ({"role": "tool", "content": "2"},)
SETTINGS = RoutedExpertsSettings(LAYERS, WIDTH, EXPERTS)
POOLED = replace(SETTINGS, gaps=True)
ARCH = Qwen3MoeArch(
    vocab_size=103,
    hidden_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=24,
    num_experts=EXPERTS,
    num_experts_per_tok=WIDTH,
    max_position_embeddings=256,
)


def experts_of(token_ids: list[int], *, shift: int = 0) -> NDArray[np.uint8]:
    """Experts of a token that depend on the token and its place: a row that slips to a neighbour is seen."""
    tokens, places = np.asarray(token_ids)[:, None, None], np.arange(len(token_ids))[:, None, None]
    layers, picks = np.arange(LAYERS)[None, :, None], np.arange(WIDTH)[None, None, :]
    return ((tokens * 5 + places * 3 + layers + picks + shift) % EXPERTS).astype(np.uint8)


# -- the dock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_the_dtype_is_the_smallest_that_is_exact(experts: int, dtype: str) -> None:
    assert exact_dtype(experts) == np.dtype(dtype)
    assert np.array(experts - 1).astype(dtype) == experts - 1


def shard_of(routes: RoutedExperts | None, tokens: int) -> BatchShard:
    flat = {name: np.zeros(tokens, np.float32) for name in ("logprobs", "advantages")}
    micro_batch = MicroBatch(
        token_ids=np.zeros(tokens, np.int32),
        cu_seqlens=np.array([0, tokens], np.int32),
        loss_mask=np.zeros(tokens, np.uint8),
        versions=np.zeros(tokens, np.int32),
        routed_experts=routes,
        **flat,
    )
    return BatchShard(step=1, rank=0, world_size=1, micro_batches=[micro_batch], stats=BatchStats.of_tokens(tokens))


def test_a_decoded_shard_has_views_into_the_message() -> None:
    experts = np.random.default_rng(0).integers(0, 256, (4096, LAYERS, WIDTH)).astype(np.uint8)
    present = np.ones(4096, np.uint8)
    present[7] = 0
    data, plain = encode_shard(shard_of(RoutedExperts.of(experts, present), 4096)), encode_shard(shard_of(None, 4096))
    # as they are: no text, no wider numbers
    assert len(data) - len(plain) < experts.nbytes + present.nbytes + 100
    routes = decode_shard(data).micro_batches[0].routed_experts
    assert routes is not None
    assert (routes.experts == experts).all()
    assert routes.experts.dtype == np.uint8
    assert np.flatnonzero(~routes.known).tolist() == [7]
    message = np.frombuffer(data, np.uint8)
    assert np.shares_memory(routes.experts, message)
    assert np.shares_memory(routes.known, message)
    assert not routes.experts.flags.writeable
    assert decode_shard(plain).micro_batches[0].routed_experts is None


def test_wide_experts_stay_exact() -> None:
    experts = np.array([[[300, 5]], [[0, 383]]], np.uint16)
    data = encode_shard(shard_of(RoutedExperts.of(experts, np.ones(2, np.uint8)), 2))
    routes = decode_shard(data).micro_batches[0].routed_experts
    assert routes is not None
    assert routes.experts.dtype == np.uint16
    assert routes.experts.tolist() == experts.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (3, LAYERS, WIDTH)}, "are not"),
        ({"dtype": "<i8"}, "unsigned"),
        ({"present": memoryview(b"\1")}, "1 flags for 2 rows"),
    ],
)
def test_what_does_not_fit_is_no_shard(change: dict[str, Any], message: str) -> None:
    good = RoutedExperts.of(experts_of([4, 5]), np.ones(2, np.uint8))
    with pytest.raises(ValueError, match=message):
        RoutedExperts(**{**msgspec.structs.asdict(good), **change})
    shard = shard_of(good, 2)
    wire = msgspec.msgpack.decode(encode_shard(shard))
    bad = {name: bytes(value) if isinstance(value, memoryview) else value for name, value in change.items()}
    wire["micro_batches"][0]["routed_experts"].update(bad)
    with pytest.raises(ValueError, match=message):
        decode_shard(msgspec.msgpack.encode(wire))


def test_packed_sequences_keep_their_rows() -> None:
    one, two = experts_of([1, 2, 3]), experts_of([9, 8])
    here, there = np.array([1, 1, 0], np.uint8), np.array([0, 1], np.uint8)
    routes = joined([RoutedExperts.of(one, here), None, RoutedExperts.of(two, there)], [3, 2, 2])
    assert routes is not None
    assert routes.known.tolist() == [True, True, False, False, False, False, True]
    assert (routes.experts[:2] == one[:2]).all()
    assert (routes.experts[6] == two[1]).all()
    assert joined([None, None], [3, 2]) is None
    assert joined([], []) is None
    with pytest.raises(ValueError, match="do not fit"):
        joined([RoutedExperts.of(one, here), RoutedExperts.of(two[:, :1], there)], [3, 2])
    with pytest.raises(ValueError, match="do not fit"):
        joined([RoutedExperts.of(one, here)], [4])


# -- rows of a conversation ----------------------------------------------------------------------------------------


def test_rows_are_read_without_a_copy() -> None:
    rows = experts_of([3, 1, 4])
    payload = base64.b64decode(npy(rows))
    read = read_rows(payload)
    assert (read == rows).all()
    assert np.shares_memory(read, np.frombuffer(payload, np.uint8))


@pytest.mark.parametrize(
    "payload",
    [
        b"no file of numpy",
        base64.b64decode(npy(np.zeros((2, 3), np.uint8))),
        base64.b64decode(npy(np.zeros((2, 3, 4), np.float32))),
        base64.b64decode(npy(np.asfortranarray(np.zeros((2, 3, 4), np.uint8)))),
        base64.b64decode(npy(np.zeros((2, 3, 4), np.uint8)))[:-1],
    ],
)
def test_other_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_rows(payload)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_rows_of_any_width_become_as_narrow_as_the_model_allows(dtype: type[np.integer[Any]]) -> None:
    """Versions of engines count in other widths; what says nothing about experts is not looked at."""
    rows, given = RoutedExpertsRows(SETTINGS), experts_of([4, 5, 6])
    rows.add(3, given.astype(dtype))
    routes = rows.aligned(4)
    assert routes is not None
    assert routes.experts.dtype == np.uint8
    assert (routes.experts[:3] == given).all()
    assert routes.known.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        # layers with experts alone, slots of a padded batch, another number of experts a token
        (np.zeros((2, LAYERS - 1, WIDTH), np.uint8), "rows have 2x2 experts .*, the model has 3x2"),
        (np.zeros((2, LAYERS, WIDTH + 1), np.int16), "rows have 3x3 experts"),
        (np.zeros((2, WIDTH, LAYERS), np.uint8), "rows have 2x3 experts"),
        # places of experts that are there twice, and marks of padding
        (np.full((2, LAYERS, WIDTH), EXPERTS, np.uint8), "expert 8 is none of the model's 8"),
        (np.full((2, LAYERS, WIDTH), -1, np.int16), "expert -1 is none of the model's 8"),
        (np.full((2, LAYERS, WIDTH), 256, np.int16), "expert 256 is none of the model's 8"),
    ],
)
def test_rows_of_another_layout_are_refused(rows: NDArray[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutedExpertsRows(SETTINGS).add(2, rows)


# -- rows that others computed -------------------------------------------------------------------------------------

OPENING = list(range(20, 31))
"""Two blocks of four tokens, and three more."""


def store_of(*, limit_bytes: int = 1 << 20) -> KnownRows:
    return KnownRows(Counters(), block=4, limit_bytes=limit_bytes, keep_versions=1)


def rows_from(store: KnownRows, tokens: list[int], *, fetched: int = 0, salt: int = 3, shift: int = 0) -> RoutedExperts:
    """Of a rollout with an opening and three tokens behind it, of whose opening some came from a pool."""
    given = experts_of([*tokens, 40, 41], shift=shift)
    given[:fetched] = 0
    rows = RoutedExpertsRows(POOLED, store)
    rows.add(len(given), given, opening=(salt, tokens))
    routes = rows.aligned(len(given) + 1)
    assert routes is not None
    return routes


def counted(store: KnownRows) -> tuple[int, int, int]:
    counters = store.counters
    return counters.rows_answer, counters.rows_shared_prefix, counters.rows_unknown


def test_rows_of_a_fetched_prefix_are_those_of_who_computed_it() -> None:
    store = store_of()
    rows_from(store, OPENING)
    assert counted(store) == (13, 0, 0)
    routes = rows_from(store, OPENING, fetched=8)
    assert routes.known.tolist() == [True] * 13 + [False]
    assert (routes.experts[:13] == experts_of([*OPENING, 40, 41])).all()
    assert counted(store) == (13 + 5, 8, 0)


def test_rows_that_an_engine_has_are_not_those_of_another_pass() -> None:
    """Two passes of one block may differ; the row of this engine counts, and the first pass stays what others get."""
    store = store_of()
    rows_from(store, OPENING)
    # the fetched prefix ends within a block
    own = rows_from(store, OPENING, fetched=6, shift=1)
    assert (own.experts[:6] == experts_of(OPENING)[:6]).all()
    assert (own.experts[6:11] == experts_of(OPENING, shift=1)[6:]).all()
    other = rows_from(store, OPENING, fetched=8)
    assert (other.experts[:8] == experts_of(OPENING)[:8]).all()


def test_a_conversation_learns_until_its_end() -> None:
    """Who computed the prompt may answer later."""
    store, given = store_of(), experts_of([*OPENING, 40])
    given[:8] = 0
    rows = RoutedExpertsRows(POOLED, store)
    rows.add(12, given, opening=(3, OPENING))
    rows_from(store, OPENING)
    routes = rows.aligned(13)
    assert routes is not None
    assert routes.known[:12].all()
    assert (routes.experts[:12] == experts_of([*OPENING, 40])).all()


@pytest.mark.parametrize(
    ("tokens", "salt", "unknown"),
    [
        (OPENING, 4, 8),  # other weights
        ([*OPENING[:6], 99, *OPENING[7:]], 3, 4),  # another second block
        ([99, *OPENING[1:]], 3, 8),  # the same block behind another one is another prefix
    ],
)
def test_other_prefixes_and_salts_stay_unknown(tokens: list[int], salt: int, unknown: int) -> None:
    store = store_of()
    rows_from(store, OPENING)
    routes = rows_from(store, tokens, fetched=8, salt=salt)
    assert int((~routes.known[:13]).sum()) == unknown
    assert counted(store) == (13 + 5, 8 - unknown, unknown)


def test_rows_die_with_the_kv_that_they_describe() -> None:
    """Versions that nobody trains on any more go, and above the limit the blocks that were not used for longest."""
    block = 4 * LAYERS * WIDTH
    store = store_of()
    rows_from(store, OPENING, salt=3)
    rows_from(store, OPENING, salt=4)
    assert store.bytes == 4 * block
    rows_from(store, OPENING, salt=5)
    assert store.bytes == 4 * block
    assert not rows_from(store, OPENING, salt=3, fetched=8).known[:8].any()
    assert rows_from(store, OPENING, salt=4, fetched=8).known[:8].all()
    small = store_of(limit_bytes=2 * block)
    rows_from(small, OPENING[:4])
    rows_from(small, OPENING[4:8])
    rows_from(small, OPENING[:4], fetched=4)  # used
    rows_from(small, [7, 7, 7, 7])
    assert small.bytes == 2 * block
    assert rows_from(small, OPENING[:4], fetched=4).known[:4].all()
    assert not rows_from(small, OPENING[4:8], fetched=4).known[:4].any()


class Bench:
    """A pool of one stub, and conversations with it."""

    def __init__(self, transcript: Transcript, stub: StubEngine, http: aiohttp.ClientSession) -> None:
        client = EngineClient(http, name="engine-0", url=stub.url)
        self.pool = EnginePool([client], counters=Counters(), request_timeout_s=5.0, max_retries=0)
        self.pool.engines[0].serve(3, proved_s=0.0)
        self.pool.engines[0].end_exchange()
        stub.version = "3"
        self.stub, self.transcript = stub, transcript

    def conversation(
        self,
        routes: RoutedExpertsSettings | None,
        stream_interval: int = 0,
        rows: KnownRows | None = None,
        keeper: TurnKeeper | None = None,
    ) -> Conversation:
        sampler = Sampler(
            self.pool,
            self.transcript,
            temperature=1.0,
            sampling=make_recipe(Path()).rollouts.sampling,
            max_model_len=256,
            stream_interval=stream_interval,
            routes=routes,
            rows=rows,
        )
        return Conversation(sampler, self.pool.session("group-0"), seed=11, keeper=keeper)

    async def two_turns(
        self, routes: RoutedExpertsSettings | None, stream_interval: int = 0, rows: KnownRows | None = None
    ) -> Rollout:
        turns = [[*encode("run 1+1"), EOS], [*encode("answer 2"), EOS]]
        self.stub.answer = lambda token_ids, seed: turns[len(self.stub.requests) - 1]
        conversation = self.conversation(routes, stream_interval, rows)
        await conversation.reply(USER)
        await conversation.reply(TOOL)
        rollout = await conversation.rollout(0, Outcome(reward=1.0), seconds=0.5)
        assert rollout is not None
        return rollout

    @property
    def starts(self) -> list[int | None]:
        return [request["sampling_params"].get("routed_experts_prompt_start") for request in self.stub.requests]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    write_character_tokenizer(tmp_path)
    stub = StubEngine()
    stub.experts = experts_of
    await stub.start()
    async with aiohttp.ClientSession() as http:
        yield Bench(Transcript(ChatTokenizer(tmp_path)), stub, http)
    await stub.stop()


@pytest.mark.parametrize("stream_interval", [0, 3])
async def test_each_turn_asks_for_rows_that_are_not_there_yet(bench: Bench, stream_interval: int) -> None:
    """The row of a turn's last token comes with the next turn; that of the rollout's last token never."""
    rollout = await bench.two_turns(SETTINGS, stream_interval)
    routes, tokens = rollout.routed_experts, rollout.token_ids.tolist()
    assert routes is not None
    assert routes.shape == (len(tokens), LAYERS, WIDTH)
    assert routes.known.tolist() == [True] * (len(tokens) - 1) + [False]
    assert (routes.experts[:-1] == experts_of(tokens)[:-1]).all()
    first = rollout.turns[0]
    assert bench.starts == [0, first.said + first.sampled - 1]


@pytest.mark.parametrize("stream_interval", [0, 3])
async def test_rows_are_fetched_from_where_the_answer_says(bench: Bench, stream_interval: int) -> None:
    """Nothing of them is left at the engine."""
    said = (await bench.two_turns(SETTINGS)).routed_experts
    bench.stub.requests.clear()
    bench.stub.rows = KeptRows()
    found = (await bench.two_turns(SETTINGS, stream_interval)).routed_experts
    assert said is not None
    assert found is not None
    assert (found.experts == said.experts).all()
    assert (found.known == said.known).all()
    assert bench.stub.rows.bytes == 0


@pytest.mark.parametrize("stream_interval", [0, 3])
@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)])
async def test_rows_that_an_engine_has_lost(bench: Bench, stream_interval: int, lost: tuple[int, ...]) -> None:
    """They come with the next turn; without one they are unknown, and counted."""
    store = KnownRows(Counters(), block=4, limit_bytes=1 << 20, keep_versions=1)
    answers = [[*encode("run 1+1"), EOS], [*encode("answer 2"), EOS]]
    bench.stub.answer = lambda token_ids, seed: answers[len(bench.stub.requests) - 1]
    conversation = bench.conversation(SETTINGS, stream_interval, store)
    for turn, messages in enumerate((USER, TOOL)):
        bench.stub.rows = KeptRows(limit_bytes=0 if turn in lost else 1 << 20)
        await conversation.reply(messages)
    rollout = await conversation.rollout(0, Outcome(reward=1.0), seconds=0.5)
    assert rollout is not None
    tokens, first = rollout.token_ids.tolist(), rollout.turns[0].said + rollout.turns[0].sampled - 1
    assert bench.starts == [0, 0 if 0 in lost else first]
    known = 0 if lost == (0, 1) else first if lost == (1,) else len(tokens) - 1
    counters = store.counters
    assert (counters.rows_answer, counters.rows_unknown) == (known, len(tokens) - 1 - known)
    routes = rollout.routed_experts
    if not known:
        assert routes is None
        return
    assert routes is not None
    assert routes.known.tolist() == [True] * known + [False] * (len(tokens) - known)
    assert (routes.experts[:known] == experts_of(tokens)[:known]).all()


async def test_what_goes_through_all_rows_is_done_beside_the_event_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.rollouts.engines.rows.LARGE_BYTES", 1)
    threads: dict[str, set[int]] = {}

    def watched(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def recorded(*arguments: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return call(*arguments)

        monkeypatch.setattr(owner, name, recorded)

    watched(RoutedExpertsSettings, "examined")
    watched(RoutedExpertsRows, "assembled")
    watched(RoutedExpertsRows, "settled")
    rollout = await bench.two_turns(SETTINGS, 3)
    assert rollout.routed_experts is not None
    assert (rollout.routed_experts.experts[:-1] == experts_of(rollout.token_ids.tolist())[:-1]).all()
    own = threading.get_ident()
    assert own not in threads["examined"] | threads["assembled"]
    # the store of shared rows is the event loop's
    assert threads["settled"] == {own}


async def test_beside_a_pool_a_rollout_has_the_rows_of_another_with_its_prompt(bench: Bench) -> None:
    """Whole conversations: the second one's engine fetched a block of the prompt, and of its later turns nothing."""
    store, block = KnownRows(Counters(), block=4, limit_bytes=1 << 20, keep_versions=1), 4
    first = await bench.two_turns(POOLED, rows=store)
    bench.stub.requests.clear()

    def fetched(tokens: list[int]) -> NDArray[np.uint8]:
        rows = experts_of(tokens)
        rows[:block] = 0
        return rows

    bench.stub.experts = fetched
    second = await bench.two_turns(POOLED, rows=store)
    assert first.routed_experts is not None
    assert second.routed_experts is not None
    assert second.token_ids.tolist() == first.token_ids.tolist()
    assert (second.routed_experts.experts == first.routed_experts.experts).all()
    assert (second.routed_experts.known == first.routed_experts.known).all()
    assert store.counters.rows_shared_prefix == block
    assert store.counters.rows_unknown == 0


@pytest.mark.parametrize("mirrored", [False, True])
async def test_rows_of_weights_that_were_undone_are_nobody_elses(bench: Bench, mirrored: bool) -> None:
    """A rollout goes on from a first turn that counts as version 3 and, mirrored, was computed by other weights."""

    def without_first_block(tokens: list[int]) -> NDArray[np.uint8]:
        rows = experts_of(tokens)
        rows[:4] = 0
        return rows

    bench.stub.experts = without_first_block
    bench.stub.answer = lambda token_ids, seed: [*encode("run 1+1"), EOS]
    saved: list[SavedTurn] = []
    keeper = TurnKeeper(lambda number, turn: saved.append(turn))
    await bench.conversation(POOLED, keeper=keeper).reply(USER)
    keeper.flush()
    (turn,) = saved
    store = KnownRows(Counters(), block=2, limit_bytes=1 << 20, keep_versions=1)
    again = TurnKeeper(lambda number, turn: None, [turn.counted_as(3) if mirrored else turn])
    goes_on = bench.conversation(POOLED, rows=store, keeper=again)
    await goes_on.reply(USER)
    assert again.recalled == 1
    assert (store.bytes == 0) is mirrored
    # nor is what is known of version 3 put into its gaps
    rows_from(store, turn.said.tolist()[:4])
    rollout = await goes_on.rollout(0, Outcome(reward=1.0), seconds=0.5)
    assert rollout is not None
    assert rollout.routed_experts is not None
    assert rollout.routed_experts.known[:4].any() == (not mirrored)


async def test_who_does_not_keep_rows_asks_for_as_few_as_possible(bench: Bench) -> None:
    rollout = await bench.two_turns(SETTINGS.unkept())
    assert rollout.routed_experts is None
    assert bench.starts == [len(request["token_ids"]) - 1 for request in bench.stub.requests]


async def test_without_the_setting_nothing_is_asked_for(bench: Bench) -> None:
    rollout = await bench.two_turns(None)
    assert rollout.routed_experts is None
    assert bench.starts == [None, None]


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "0 rows of experts for 13 tokens, from token 0 of 6"),
        (lambda tokens: experts_of([*tokens, 5]), "14 rows of experts for 13 tokens"),
        (lambda tokens: experts_of(tokens).astype(np.float32), "cannot be read"),
        (lambda tokens: experts_of(tokens).astype(np.int64) + 256, "is none of the model's 8"),
    ],
)
async def test_rows_that_cannot_be_placed_are_refused(
    bench: Bench, experts: Callable[[list[int]], NDArray[Any]] | None, message: str
) -> None:
    bench.stub.experts = experts
    with pytest.raises(EngineProtocolError, match=message):
        await bench.two_turns(SETTINGS)


async def test_rows_survive_the_ledger(bench: Bench) -> None:
    rollout = await bench.two_turns(SETTINGS)
    back = decode_rollout(b"".join(encode_columns(*encode_rollout(rollout))))
    assert rollout.routed_experts is not None
    assert back.routed_experts is not None
    assert (back.routed_experts.experts == rollout.routed_experts.experts).all()
    assert (back.routed_experts.known == rollout.routed_experts.known).all()


# -- an answer of several engines ----------------------------------------------------------------------------------


def partial_generation_of(prompt: list[int], start: int) -> PartialGeneration:
    params = SamplingParams(
        temperature=1.0, max_tokens=10, seed=5, stop_token_ids=[EOS], routed_experts_prompt_start=start
    )
    return PartialGeneration(prompt, params)


def start_of(request: tuple[list[int], SamplingParams]) -> int:
    start = request[1].routed_experts_prompt_start
    assert isinstance(start, int)
    return start


PROMPT, ANSWER = [1, 2, 3, 4], [10, 11, 12, 13, EOS]
LOST, NEXT = experts_of([*PROMPT, *ANSWER]), experts_of([*PROMPT, *ANSWER], shift=1)


def rest_of(first: int, rows: NDArray[Any]) -> Generation:
    """The answer from its token ``first`` on."""
    count = len(ANSWER) - first
    return Generation(*sampled(ANSWER[first:]), np.full(count, 4, np.int32), "stop", rows)


def sampled(token_ids: list[int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32)


def test_rows_of_kept_tokens_are_those_of_the_engine_that_sampled_them() -> None:
    draft = partial_generation_of(PROMPT, 2)
    assert start_of(draft.request(lambda: 3)) == 2
    draft.receive(*sampled([10]), LOST[2:4])
    draft.receive(*sampled([11, 12]), LOST[4:6])
    assert draft.keep() == 3
    assert draft.keep() == 0
    # the last kept token has not gone into the lost engine's model
    assert start_of(draft.request(lambda: 3)) == 6
    whole = draft.whole(rest_of(3, NEXT[6:8]))
    assert whole.experts is not None
    assert (whole.experts == np.concatenate([LOST[2:6], NEXT[6:8]])).all()


def test_rows_that_a_lost_engine_did_not_send_are_those_of_the_next_one() -> None:
    draft = partial_generation_of(PROMPT, 2)
    draft.request(lambda: 3)
    draft.receive(*sampled([10]))
    draft.keep()
    assert start_of(draft.request(lambda: 3)) == 2
    draft.receive(*sampled([11]), NEXT[2:5])
    draft.keep()
    assert start_of(draft.request(lambda: 3)) == 5
    whole = draft.whole(rest_of(2, LOST[5:8]))
    assert whole.experts is not None
    assert (whole.experts == np.concatenate([NEXT[2:5], LOST[5:8]])).all()


def test_without_the_rows_of_the_rest_those_of_kept_tokens_are_not_used() -> None:
    """Rows are placed from the end of an answer."""
    draft = partial_generation_of(PROMPT, 2)
    draft.request(lambda: 3)
    draft.receive([10, 11], [0.0, 0.0], LOST[2:5])
    assert draft.keep() == 2
    draft.request(lambda: 4)
    whole = draft.whole(msgspec.structs.replace(rest_of(2, NEXT), experts=None))
    assert whole.token_ids.tolist() == ANSWER
    assert whole.experts is None


def test_rows_of_an_attempt_that_is_not_kept_are_forgotten() -> None:
    draft = partial_generation_of(PROMPT, 0)
    draft.request(lambda: 3)
    draft.receive(*sampled([10]), LOST[:4])
    assert start_of(draft.request(lambda: 3)) == 0
    assert draft.whole(rest_of(0, NEXT[:8])).experts is not None
    assert draft.experts is None


def test_rows_are_cut_with_their_tokens() -> None:
    """One token is always asked for: of ten that arrived nine are kept."""
    draft = partial_generation_of([1], 0)
    draft.request(lambda: 0)
    rows = experts_of([1, *range(10, 20)])
    draft.receive(*sampled(list(range(10, 20))), rows[:10])
    assert draft.keep() == 9
    assert draft.experts is not None
    assert len(draft.experts) == 9
    assert start_of(draft.request(lambda: 0)) == 9


def test_replay_asks_for_rows_by_itself(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", ARCH.to_hf_config())
    assert RoutedExpertsSettings.of(make_recipe(tmp_path)) is None
    changes: tuple[dict[str, Any], ...] = (
        {"engine": {"return_routed_experts": True}},
        {"trainer": {"router_replay": True}},
    )
    for change in changes:
        assert RoutedExpertsSettings.of(make_recipe(tmp_path, **change)) == SETTINGS
    pooled = {"engine": {"backend": "vllm", "return_routed_experts": True, "kv_store": {"segment_gib": 1.0}}}
    assert RoutedExpertsSettings.of(make_recipe(tmp_path, **pooled)) == POOLED


@pytest.mark.parametrize(
    ("in_parts", "kept"),
    [
        pytest.param(True, False, id="in parts"),
        pytest.param(False, False, id="with the end"),
        pytest.param(True, True, id="in parts, by reference"),
    ],
)
async def test_no_row_is_lost_or_doubled_with_an_engine(
    tmp_path: Path, monkeypatch: Any, in_parts: bool, kept: bool
) -> None:
    """The whole orchestrator: batches have one row a token, of either engine, and none for a rollout's last one."""
    monkeypatch.setattr(engine_pool, "WATCH_S", 0.1)
    monkeypatch.setattr(engine_pool, "_HEALTH_S", 0.3)
    monkeypatch.setattr(orchestrator, "engines_lost_after_s", lambda run: 20.0)
    text = encode("abcdefghijklmnopqrstuvwxyz0123456789")

    def going_on(token_ids: list[int], seed: int) -> list[int]:
        said = next((n for n in range(len(text), 0, -1) if token_ids[-n:] == text[:n]), 0)
        return [*text[said:], EOS]

    one, two = StubEngine(answer=going_on), StubEngine(answer=going_on)
    one.experts, two.experts = experts_of, lambda tokens: experts_of(tokens, shift=1)
    for stub in (one, two):
        stub.token_s, stub.experts_in_parts = 0.03, in_parts
        stub.rows = KeptRows() if kept else None
    rollouts = {"rollouts_per_step": 8, "max_in_flight": 8, "max_off_policy_steps": 1, "stream_interval": 4}
    rollouts["sampling"] = {"max_new_tokens": 64}
    run = make_run(tmp_path, rollouts=rollouts, engine={"return_routed_experts": True})
    write_json(tmp_path / "model" / "config.json", ARCH.to_hf_config())
    async with running(run, one, two) as loop:
        await loop.until(lambda: one.in_flight >= 4 and one.sampled >= 4 * 20)
        await one.stop()
        batch = await loop.batch(1)
        assert loop.orchestrator._counters.tokens_kept > 0
    shares = set()
    for micro in batch.micro_batches:
        if not len(micro.token_ids):
            assert micro.routed_experts is None
            continue
        assert micro.routed_experts is not None
        for start, end in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
            tokens = micro.token_ids[start:end].tolist()
            rows, known = micro.routed_experts.experts[start:end], micro.routed_experts.known[start:end]
            assert known.tolist() == [True] * (len(tokens) - 1) + [False]
            of_one = (rows == experts_of(tokens)).all((1, 2))[:-1]
            of_two = (rows == experts_of(tokens, shift=1)).all((1, 2))[:-1]
            assert (of_one ^ of_two).all()
            # the lost engine's rows come first, without a gap
            assert of_one.tolist() == sorted(of_one.tolist(), reverse=True)
            shares.add(round(float(of_one.mean()), 6))
    assert any(0.0 < share < 1.0 for share in shares) if in_parts else shares == {0.0}
