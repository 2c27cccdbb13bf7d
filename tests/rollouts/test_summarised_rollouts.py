"""Rollouts that go on from summaries, from an environment's own process into batches, ledger and counters."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from harness import make_run, running
from stub_engine import StubEngine
from thinking_lab import write_thinking_tokenizer

from hpcrl.dock.ledger.entries import read_entries
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Replay
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.core.records import Rollout, decode_rollout
from hpcrl.rollouts.telemetry.metrics_text import render_metrics
from hpcrl.runs.rollout_failures import read_failures
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.failures import failure_lines
from hpcrl.runs.views.rollouts import rollout_items, verify_rollouts

COMMANDS = 7
"""Commands of a rollout, in all of its sequences."""


class Worker:
    """Runs commands; writes how many it has run where it is asked for a summary, and goes on from there."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = ChatTokenizer(path)

    def __call__(self, token_ids: list[int], seed: int) -> list[int]:
        text = self._tokenizer.decode(token_ids)
        if "Mend" not in text:
            return [self._tokenizer.eos_token_id]  # a probe
        _, _, summary = text.rpartition("Your summary of that work:")
        begun = int(summary.split()[0]) if "Your summary of that work:" in text else 0
        done = begun + text.count(" is done. ")
        if "Write a summary" in text:
            # the last result may have been left out
            said = f"{done} commands, {seed % 997}"
        elif done < COMMANDS:
            said = f'<tool_call>{{"name": "bash", "arguments": {{"command": "c{seed % 997}"}}}}</tool_call>'
        else:
            said = f"finished {seed % 997}"
        return self._tokenizer.encode(f"{said}<|im_end|>")


def new_run(path: Path, **rollouts: Any) -> RunDir:
    environment = {
        "name": "mend",
        "kind": "custom",
        "factory": "summarising_environment:Summarising",
        "args": {"summary_points": [500, 600], "summary_room_tokens": 100, "max_turns": 40},
    }
    run = make_run(
        path,
        environments=[environment],
        model={"path": str(path / "model"), "chat": {"format": "qwen3"}},
        rollouts={"max_off_policy_steps": 3, "max_in_flight": 16, "sampling": {"max_new_tokens": 200}, **rollouts},
        engine={"max_model_len": 4096},
        trainer={"micro_batch_tokens": 8192},
    )
    write_thinking_tokenizer(path / "model")
    return run


def engine_for(run: RunDir) -> StubEngine:
    return StubEngine(answer=Worker(run.path.parent / "model"))


def finished_of(run: RunDir) -> dict[tuple[int, int], Rollout]:
    payload = run.rollouts_dir / "payload"
    replay = Replay(read_entries(run.rollouts_dir / "ledger"))
    return {held.id: decode_rollout(read_payload(payload, held.entry.payload)) for held in replay.rollouts}


async def test_batches_ledger_and_counters(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    engine = engine_for(run)
    async with running(run, engine) as loop:
        (shard,) = await loop.train(1, 1)
        rollouts, counters = loop.last_rollouts(), loop.parts.counters
        await loop.until(lambda: read_failures(run) and read_failures(run)[0].tampered)
    shown, tampered = render_metrics(counters.as_dict(), {}, {}), counters.judge_tampered
    tokenizer = ChatTokenizer(tmp_path / "model")
    for rollout in rollouts:
        texts = [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in rollout.sequences]
        branches = int(rollout.parts["summaries"]) + 1
        assert len(texts) == branches >= 3
        # with the first turn behind each summary, and with no other
        assert [turn.declared for turn in rollout.turns].count(1) == branches - 1
        assert {turn.sequence for turn in rollout.turns if turn.declared} == set(range(1, branches))
        assert ["Write a summary" in text for text in texts] == [True] * (branches - 1) + [False]
        assert ["Your summary of that work:" in text for text in texts] == [False] + [True] * (branches - 1)
        # each summary was sampled in one sequence, and is context in the next
        assert texts[-1].rstrip().endswith("<|im_end|>")
    # each sampled token is trained once
    wanted = sum(rollout.sampled_tokens for rollout in rollouts)
    assert shard.stats.total_sampled_tokens == wanted == sum(int(m.loss_mask.sum()) for m in shard.micro_batches)
    sampled = Counter(tuple(r.token_ids[r.sampled.astype(bool)].tolist()) for r in rollouts)
    assert len(sampled) == len(rollouts)
    assert counters.declared_branches >= 2 * counters.branched == 2 * counters.finished
    assert 0 < tampered < counters.finished
    assert f"hpcrl_rollouts_judge_tampered_total {tampered}" in shown
    assert "hpcrl_rollouts_declared_branches_total" in shown
    assert any("rollouts interfered with their judge" in line for line in failure_lines(read_failures(run)))
    assert verify_rollouts(run).problems == []
    items = rollout_items(Replay(read_entries(run.rollouts_dir / "ledger")).rollouts)
    assert min(item.branches for item in items) >= 3


def turns_of(run: RunDir) -> dict[tuple[int, int], int]:
    """Return the number of saved turns of each unfinished rollout."""
    unfinished = Replay(read_entries(run.rollouts_dir / "ledger")).unfinished
    return {name: len(each.turns) for name, each in unfinished.items()}


async def test_a_kill_costs_no_turn(tmp_path: Path) -> None:
    whole, cut = new_run(tmp_path / "whole"), new_run(tmp_path / "cut")
    async with running(whole, engine_for(whole)) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: not loop.parts.scheduler.in_flight)
    engine = engine_for(cut)
    engine.request_s = lambda number: 0.0 if number <= 90 else 60.0
    async with running(cut, engine) as loop:
        scheduler = loop.parts.scheduler
        await loop.until(lambda: engine.in_flight == scheduler.in_flight > 0 and engine.started > 90)
        # nobody waits for the entries of turns
        await loop.until(lambda: max(turns_of(cut).values(), default=0) > 4)
        await asyncio.to_thread(shutil.copytree, cut.rollouts_dir, cut.path / "then")
    shutil.rmtree(cut.rollouts_dir)
    shutil.move(cut.path / "then", cut.rollouts_dir)
    cut.start_attempt()
    turns = turns_of(cut)
    # some have gone on from a summary already
    assert max(turns.values()) > 4
    async with running(cut, engine_for(cut)) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: not loop.parts.scheduler.in_flight)
        counters = loop.parts.counters
    assert (counters.turns_recalled, counters.turns_given_up) == (sum(turns.values()), 0)
    found, wanted = finished_of(cut), finished_of(whole)
    for name in turns:
        for column in ("token_ids", "sampled", "starts", "shared"):
            assert np.array_equal(getattr(found[name], column), getattr(wanted[name], column)), (name, column)
    assert verify_rollouts(cut).problems == []
