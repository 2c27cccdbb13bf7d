"""Log-ratios by token that a whole trainer records: its own metrics are made of them. The leader writes them."""

import math

import numpy as np
import pytest
import torch
from trainer_testing import (
    Rollouts,
    StubDock,
    make_recipe,
    run_ranks,
    start_attempt,
    tiny_model,
    write_model_dir,
    write_recipe,
)

from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.models.arch import load_arch
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.token_ratios import KEPT_STEPS, StepRatios, ratios_path, read_ratios, tokens_digest
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.trainer.loop import train

COUNT = 6
"""Rollouts of a step: no more than a record has, so that all of them are recorded."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("recorded") / "model")


def rank_train(rank, run_path, attempt):
    train(RoleContext(RunDir(run_path), attempt=attempt, role="trainer", replica=0, rank=rank))


def train_ranks(path, model_dir, ranks, **trainer):
    """Return a run of one step by several ranks."""
    run = RunDir(path)
    write_recipe(run, make_recipe(model_dir, steps=1, **trainer))
    with StubDock(rollouts_per_step=COUNT).serving() as dock:
        run_ranks(ranks, rank_train, run.path, start_attempt(run, dock).attempt)
    assert [record.step for record in read_metrics(run)] == [1]
    return run


def ratios_by_hand(model_dir):
    """Return the log-ratios of each rollout of step 1, which the start model trains on."""
    model, found = tiny_model(load_arch(model_dir)), {}
    for rollout in Rollouts(1, count=COUNT).rollouts:
        tokens = torch.from_numpy(rollout.token_ids).long()
        with torch.no_grad():
            logits = model(tokens, PackedAttention(torch.tensor([0, len(tokens)])).context())
        logprobs = logits.log_softmax(-1)
        sampled = np.flatnonzero(rollout.loss_mask)
        own = [float(logprobs[at - 1, tokens[at]]) - float(rollout.logprobs[at]) for at in sampled]
        found[(1, *rollout.rollouts[0])] = own
    return found


def test_a_resumed_run_records_what_the_metrics_of_each_step_are_made_of(tmp_path, model_dir):
    run, first, last = RunDir(tmp_path / "run"), 4, KEPT_STEPS + 3
    with StubDock(rollouts_per_step=COUNT).serving() as dock:
        for steps in (first, last):
            write_recipe(run, make_recipe(model_dir, steps=steps))
            train(start_attempt(run, dock))
    found, records = read_ratios(run), {record.step: record for record in read_metrics(run)}
    assert list(records) == list(range(1, last + 1))
    newest = range(last - KEPT_STEPS + 1, last + 1)
    assert newest[0] == first
    for step in newest:
        own = {key: each for key, each in found.items() if key[0] == step}
        batch = Rollouts(step, count=COUNT)
        assert sorted(own) == sorted((step, *rollout.rollouts[0]) for rollout in batch.rollouts)
        for rollout in batch.rollouts:
            assert own[step, *rollout.rollouts[0]].digest == tokens_digest(rollout.token_ids[rollout.loss_mask != 0])
        values = [value for each in own.values() for value in each.log_ratios]
        assert len(values) == records[step].sampled_tokens == batch.sampled
        k3 = [math.exp(value) - 1.0 - value for value in values]
        assert sum(k3) / len(k3) == pytest.approx(records[step].mismatch_kl, rel=1e-3)
        attempt = decode_json(ratios_path(run, step).read_bytes(), StepRatios).attempt
        assert attempt == records[step].attempt == (1 if step == first else 2)


def test_the_leader_of_two_ranks_records_its_own_rollouts(tmp_path, model_dir):
    run = train_ranks(tmp_path / "run", model_dir, 2)
    wanted, found = ratios_by_hand(model_dir), read_ratios(run)
    assert sorted(found) == sorted(wanted)[::2]
    for key, each in found.items():
        assert each.log_ratios == pytest.approx(wanted[key], abs=2e-4)


def test_ranks_that_share_a_context_record_nothing(tmp_path, model_dir):
    run = train_ranks(tmp_path / "run", model_dir, 2, parallelism={"cp": 2})
    assert read_ratios(run) == {}
    assert not ratios_path(run, 0).parent.exists()
