"""Experts of tokens from engines to rollouts: one row a token, over turns, lost engines and missing rows."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from harness import make_recipe, make_run, running
from numpy.typing import NDArray
from routed_rows_testing import ARCH, LAYERS, POOLED, SETTINGS, TOOL, USER, WIDTH, experts_of, rows_from
from stub_engine import EOS, StubEngine, encode

from hpcrl.dock.columns import encode_columns
from hpcrl.inference.kept_rows import KeptRows
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts import parts as orchestrator_parts
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Rollout, decode_rollout, encode_rollout
from hpcrl.rollouts.core.saved_turns import SavedTurn, TurnKeeper
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines import unusable
from hpcrl.rollouts.engines.client import EngineClient, EngineProtocolError
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Outcome
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling import branches
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsRows, RoutedExpertsSettings
from hpcrl.storage.files import write_json


class Bench:
    """A pool of one stub, and conversations with it."""

    def __init__(self, renderer: Renderer, stub: StubEngine, http: aiohttp.ClientSession) -> None:
        client = EngineClient(http, name="engine-0", url=stub.url)
        self.pool = EnginePool([client], counters=Counters(), request_timeout_s=5.0, max_retries=0)
        self.pool.engines[0].serve(3, proved_s=0.0)
        self.pool.engines[0].end_exchange()
        stub.version = "3"
        self.stub, self.renderer, self.http = stub, renderer, http

    def conversation(
        self,
        routes: RoutedExpertsSettings | None,
        stream_interval: int = 0,
        rows: KnownRows | None = None,
        keeper: TurnKeeper | None = None,
    ) -> Conversation:
        sampler = Sampler(
            self.pool,
            self.renderer,
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
        yield Bench(Renderer(ChatTokenizer(tmp_path)), stub, http)
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


class Asked(KeptRows):
    """A store that has nothing, and counts who asks."""

    asked = 0

    async def take(self, name: str, *, late: bool = False) -> bytes | None:
        self.asked += 1
        return None


async def test_what_cannot_be_placed_any_more_is_not_fetched(bench: Bench) -> None:
    """Rows of later parts are known by their number alone. Each may take as long as there is for one."""
    bench.stub.rows = store = Asked()
    bench.stub.answer = lambda token_ids, seed: [*encode("run 1+1"), EOS]
    await bench.conversation(SETTINGS, stream_interval=1).reply(USER)
    assert store.asked == 1


async def test_work_on_all_rows_is_done_in_a_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.rollouts.engines.rows.LARGE_BYTES", 1)
    threads: dict[str, set[int]] = {}

    def watched(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def recorded(*arguments: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return call(*arguments)

        monkeypatch.setattr(owner, name, recorded)

    watched(RoutedExpertsSettings, "examined")
    watched(branches, "assembled")
    watched(RoutedExpertsRows, "settled")
    rollout = await bench.two_turns(SETTINGS, 3)
    assert rollout.routed_experts is not None
    assert (rollout.routed_experts.experts[:-1] == experts_of(rollout.token_ids.tolist())[:-1]).all()
    own = threading.get_ident()
    assert own not in threads["examined"] | threads["assembled"]
    # the store of shared rows is the event loop's
    assert threads["settled"] == {own}


async def test_with_a_pool_a_rollout_has_the_rows_of_another_with_its_prompt(bench: Bench) -> None:
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


@pytest.mark.parametrize("second", [3, 4, 2])
async def test_rows_of_a_lost_engine_with_other_weights_are_not_shared(bench: Bench, second: int) -> None:
    """What another rollout fetches under the salt of the second engine is KV of that one's weights."""
    two = StubEngine()
    two.experts, two.version = partial(experts_of, shift=1), str(second)
    await two.start()
    one, store = bench.stub, KnownRows(Counters(), block=2, limit_bytes=1 << 20, keep_versions=1)
    clients = [EngineClient(bench.http, name=f"engine-{n}", url=stub.url) for n, stub in enumerate((one, two))]
    bench.pool = EnginePool(clients, counters=Counters(), request_timeout_s=5.0, max_retries=1)
    for engine, version in zip(bench.pool.engines, (3, second), strict=True):
        engine.serve(version, proved_s=math.inf)
        engine.end_exchange()
    text = [*encode("run 1+1"), EOS]
    one.answer, one.token_s = lambda token_ids, seed: text, 0.05
    two.answer = lambda token_ids, seed: text[-1 - one.sampled :]
    reply = asyncio.create_task(bench.conversation(POOLED, stream_interval=1, rows=store).reply(USER))
    while one.sampled < 3:
        await asyncio.sleep(0.01)
    await one.stop()
    await reply
    await two.stop()
    assert two.requests[0]["sampling_params"]["routed_experts_prompt_start"] > 0
    assert (store.bytes == 0) is (second != 3)


@pytest.mark.parametrize("mirrored", [False, True])
async def test_rows_of_weights_that_were_undone_are_not_shared(bench: Bench, mirrored: bool) -> None:
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


def test_rows_that_an_answer_has_lost_are_asked_for_again() -> None:
    """Its prompt is known from prefill; the turn behind it computes the rest anew. What it says of others stays."""
    all_rows = experts_of(encode("0123456789"))
    known = RoutedExpertsRows(POOLED)
    lost = all_rows[:6].copy()
    lost[1], lost[4:] = 0, 0
    known.add(6, lost)
    assert known.start(10) == 4
    known.add(9, all_rows[4:9])
    assert known.start(12) == 9
    found = known.aligned(10)
    assert found is not None
    assert found.known.tolist() == [True, False, *[True] * 7, False]
    assert (found.experts[found.known] == all_rows[found.known]).all()


async def test_who_does_not_keep_rows_asks_for_as_few_as_possible(bench: Bench) -> None:
    rollout = await bench.two_turns(SETTINGS.unkept())
    assert rollout.routed_experts is None
    assert bench.starts == [len(request["token_ids"]) - 1 for request in bench.stub.requests]
    # and engines that can leave them out are told to
    assert [request["rows_unwanted"] for request in bench.stub.requests] == [True, True]


async def test_who_keeps_rows_does_not_say_that_they_are_unwanted(bench: Bench) -> None:
    rollout = await bench.two_turns(SETTINGS)
    assert rollout.routed_experts is not None
    assert not any("rows_unwanted" in request for request in bench.stub.requests)


async def test_without_the_setting_nothing_is_asked_for(bench: Bench) -> None:
    rollout = await bench.two_turns(None)
    assert rollout.routed_experts is None
    assert bench.starts == [None, None]


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "routed experts of 0, not 13 tokens, from token 0 of 6"),
        (lambda tokens: experts_of([*tokens, 5]), "routed experts of 14, not 13 tokens"),
        (lambda tokens: experts_of(tokens).astype(np.float32), "cannot be read"),
        (lambda tokens: experts_of(tokens).astype(np.int64) + 256, "is not one of the model's 8"),
    ],
)
async def test_rows_that_cannot_be_placed_are_refused(
    bench: Bench, experts: Callable[[list[int]], NDArray[Any]] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unusable, "PATIENCE_S", 0.0)
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
    monkeypatch.setattr(engine_pool, "HEALTH_S", 0.3)
    monkeypatch.setattr(orchestrator_parts, "engines_lost_after_s", lambda run: 20.0)
    text = encode("abcdefghijklmnopqrstuvwxyz0123456789")

    def with_ledger(token_ids: list[int], seed: int) -> list[int]:
        said = next((n for n in range(len(text), 0, -1) if token_ids[-n:] == text[:n]), 0)
        return [*text[said:], EOS]

    one, two = StubEngine(answer=with_ledger), StubEngine(answer=with_ledger)
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
        assert loop.parts.counters.tokens_kept > 0
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


class UnsaltedPool(EnginePool):
    """A pool whose engines cache under a key of their own: it asks no rollout for a salt."""

    async def generate(self, *arguments: Any, **named: Any) -> Any:
        async def own() -> str:
            return "own"

        return await super().generate(*arguments, **{**named, "cache_salt": own})


@pytest.mark.parametrize("salted", [True, False])
async def test_rows_without_a_salt_are_not_shared(bench: Bench, salted: bool) -> None:
    """Nothing says which weights computed such a prompt."""
    if not salted:
        bench.pool.__class__ = UnsaltedPool
    store = KnownRows(Counters(), block=2, limit_bytes=1 << 20, keep_versions=3)
    bench.stub.answer = lambda token_ids, seed: [*encode("run 1+1"), EOS]
    saved: list[SavedTurn] = []
    keeper = TurnKeeper(lambda number, turn: saved.append(turn))
    await bench.conversation(POOLED, rows=store, keeper=keeper).reply(USER)
    keeper.flush()
    assert [turn.salt for turn in saved] == ([3] if salted else [-1])
    assert (store.bytes > 0) is salted
