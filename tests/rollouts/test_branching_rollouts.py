"""Rollouts whose history changes at each turn: into batches, into the ledger, and through kills of the orchestrator."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Loop, consumed_dir, make_run, running
from stub_engine import StubEngine
from thinking_lab import CUT, write_thinking_tokenizer

from hpcrl.dock.ledger.entries import read_entries
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Replay
from hpcrl.dock.wire import BatchShard
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.core.records import Rollout, decode_rollout
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.environments.data_order import DataOrder
from hpcrl.rollouts.environments.sandbox import ProgramRunner
from hpcrl.runs.rollout_failures import read_failures
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import rollout_items, verify_rollouts

TURNS = 4
ENVIRONMENT = {"name": "calculator", "kind": "calculator", "max_turns": 8}


@pytest.fixture(autouse=True)
def tool(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: ProgramRunner, program: str) -> str:
        return "12"

    monkeypatch.setattr(ProgramRunner, "run", run)


def new_run(path: Path, **rollouts: Any) -> RunDir:
    run = make_run(
        path,
        environments=[ENVIRONMENT],
        model={"path": str(path / "model"), "chat": CUT},
        rollouts={"max_off_policy_steps": 3, "max_in_flight": 16, **rollouts},
    )
    write_thinking_tokenizer(path / "model")
    return run


class Thinker:
    """Plays the calculator in four turns, and thinks in each; of seeds that are ``quiet`` it does not think."""

    def __init__(self, path: Path, *, quiet: int = 0) -> None:
        self._tokenizer, self._quiet = ChatTokenizer(path), quiet
        self._start = self._tokenizer.id_of("<|im_start|>")

    def __call__(self, token_ids: list[int], seed: int) -> list[int]:
        # a question, then a reply and a result a turn, and the beginning of the next reply
        number = (token_ids.count(self._start) - 2) // 2
        if number < 0:
            return [self._tokenizer.eos_token_id]  # a probe
        question = self._tokenizer.decode(token_ids).partition("user\n")[2].partition("\n")[0]
        thinks = self._quiet == 0 or sum(map(ord, question)) % self._quiet
        thought = f"<think>{seed % 97}</think>" if thinks else ""
        text = f"run {seed % 1000}+{number}" if number < TURNS - 1 else f"answer {seed % 3}"
        return self._tokenizer.encode(f"{thought}{text}<|im_end|>")


def engine_for(run: RunDir, **options: Any) -> StubEngine:
    return StubEngine(answer=Thinker(run.path.parent / "model", **options))


def finished_of(run: RunDir) -> dict[tuple[int, int], Rollout]:
    payload = run.rollouts_dir / "payload"
    replay = Replay(read_entries(run.rollouts_dir / "ledger"))
    return {held.id: decode_rollout(read_payload(payload, held.entry.payload)) for held in replay.rollouts}


def sampled_of(shard: BatchShard) -> Counter[tuple[int, ...]]:
    """The sampled runs of tokens of a batch, which are its turns."""
    found: Counter[tuple[int, ...]] = Counter()
    for batch in shard.micro_batches:
        flags = batch.loss_mask.astype(np.int8)
        for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], flags[begin:end], [0]])))
            for first, last in edges.reshape(-1, 2):
                found[tuple(batch.token_ids[begin + first : begin + last].tolist())] += 1
    return found


async def test_a_batch_has_each_turn_once_and_says_how_many_branches_there_are(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    async with running(run, engine_for(run)) as loop:
        (shard,) = await loop.train(1, 1)
        rollouts = loop.last_rollouts()
        counters = loop.parts.counters
    tokenizer = ChatTokenizer(tmp_path / "model")
    assert {len(rollout.lengths) for rollout in rollouts} == {TURNS}
    for rollout in rollouts:
        texts = [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in rollout.sequences]
        # each thought is in the sequence that thought it, and in no other
        assert [text.count("<think>") for text in texts] == [1] * TURNS
    wanted = Counter(
        tuple(rollout.token_ids[at : at + turn.sampled].tolist())
        for rollout in rollouts
        for turn, at in zip(rollout.turns, np.cumsum(rollout.lengths) - [t.sampled for t in rollout.turns], strict=True)
    )
    assert sampled_of(shard) == wanted
    begun = [name for batch in shard.micro_batches for name in batch.begun_rollouts]
    assert len(begun) == len(set(begun)) == 16
    stats = shard.stats
    assert (stats.branches_mean, stats.branches_max, stats.reward_count) == (TURNS, TURNS, 16)
    assert stats.prefix_repeated_tokens == sum(rollout.repeated_tokens for rollout in rollouts) > 0
    assert stats.total_tokens == sum(len(rollout.token_ids) for rollout in rollouts)
    assert stats.total_sampled_tokens == sum(rollout.sampled_tokens for rollout in rollouts)
    assert counters.branched == counters.finished
    assert verify_rollouts(run).problems == []
    items = rollout_items(Replay(read_entries(run.rollouts_dir / "ledger")).rollouts)
    assert {item.branches for item in items} == {TURNS}
    (line, *_) = (consumed_dir(run) / "step-000001.jsonl").read_text().splitlines()
    document = json.loads(line)
    assert document["branches"] == TURNS
    # the text has what sequences share once
    assert document["text"].count("<|im_start|>user") < TURNS


async def killed(run: RunDir, requests: int) -> None:
    """An engine stops answering; what is left is what was on disk then, as after SIGKILL."""
    engine = engine_for(run)
    engine.request_s = lambda number: 0.0 if number <= requests else 60.0
    async with running(run, engine) as loop:
        scheduler = loop.parts.scheduler
        await loop.until(lambda: engine.in_flight == scheduler.in_flight > 0 and engine.started > requests)
        await asyncio.to_thread(shutil.copytree, run.rollouts_dir, run.path / "then")
    shutil.rmtree(run.rollouts_dir)
    shutil.move(run.path / "then", run.rollouts_dir)
    run.start_attempt()


async def trained(run: RunDir, engine: StubEngine) -> Loop:
    async with running(run, engine) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: not loop.parts.scheduler.in_flight)
    return loop


async def test_a_kill_costs_no_turn_of_a_branching_rollout(tmp_path: Path) -> None:
    """Rollouts that go on have the sequences that they would have had."""
    whole, cut = new_run(tmp_path / "whole"), new_run(tmp_path / "cut")
    await trained(whole, engine_for(whole))
    await killed(cut, requests=43)
    unfinished = Replay(read_entries(cut.rollouts_dir / "ledger")).unfinished
    turns = {name: len(each.turns) for name, each in unfinished.items()}
    assert sum(count > 1 for count in turns.values()) >= 3
    assert verify_rollouts(cut).problems == []
    engine = engine_for(cut)
    loop = await trained(cut, engine)
    order, asked = DataOrder(loop.recipe, loop.environments), [r["sampling_params"]["seed"] for r in engine.requests]
    for name, count in turns.items():
        seeds = [stable_hash("turn", order.rollout_seed(*name), number) for number in range(TURNS)]
        assert [asked.count(seed) for seed in seeds] == [0] * count + [1] * (TURNS - count)
    counters = loop.parts.counters
    assert (counters.turns_recalled, counters.turns_given_up) == (sum(turns.values()), 0)
    found, wanted = finished_of(cut), finished_of(whole)
    for name in turns:
        for column in ("token_ids", "sampled", "starts", "shared"):
            assert np.array_equal(getattr(found[name], column), getattr(wanted[name], column)), (name, column)
        assert [turn.sequence for turn in found[name].turns] == [0, 1, 2, 3]
        assert [turn.said for turn in found[name].turns] == [turn.said for turn in wanted[name].turns]
    verdict = verify_rollouts(cut)
    assert (verdict.problems, verdict.unfinished) == ([], 0)


async def test_rollouts_with_too_many_branches_are_dropped_and_counted(tmp_path: Path) -> None:
    run = new_run(tmp_path, max_branches=TURNS - 1, failures={"end_share": None})
    async with running(run, engine_for(run, quiet=2)) as loop:
        (shard,) = await loop.train(1, 1)
        counters = loop.parts.counters
        assert counters.dropped_branches >= 4
        assert counters.dropped_environment == counters.dropped_engine == 0
        await loop.until(lambda: read_failures(run))
    assert (shard.stats.branches_mean, shard.stats.branches_max, shard.stats.prefix_repeated_tokens) == (1.0, 1, 0)
    (failures,) = read_failures(run)
    assert failures.failed.keys() == {"branches"}
    assert "more than 3 sequences (rollouts.max_branches)" in failures.first["branches"].what
