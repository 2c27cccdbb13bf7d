"""Log-ratios of a few rollouts of a step: those of a plain model, rollout by rollout, in the file of the step."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from trainer_testing import Rollouts, make_recipe, tiny_model, write_model_dir

from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.models.arch import load_arch
from hpcrl.reporting import reports
from hpcrl.runs.metrics import MetricsWriter
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.token_ratios import KEPT_STEPS, RolloutRatios, ratios_path, read_ratios, tokens_digest
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step import ratio_sample
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.trainer.step.ratio_sample import MOST_ROLLOUTS, RatioSample

STEP, COUNT = 3, 17


def by_hand(arch, batch):
    """Of each rollout the log-ratios of its sampled tokens, each computed alone."""
    model, found = tiny_model(arch), {}
    for rollout in batch.rollouts:
        tokens = torch.from_numpy(rollout.token_ids).long()
        with torch.no_grad():
            logits = model(tokens, PackedAttention(torch.tensor([0, len(tokens)])).context())
        logprobs = logits.log_softmax(-1)
        sampled = np.flatnonzero(rollout.loss_mask)
        own = [float(logprobs[at - 1, tokens[at]]) - float(rollout.logprobs[at]) for at in sampled]
        found[rollout.rollouts[0]] = own
    return found


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_log_ratios_are_those_of_a_plain_model(tmp_path, chunk, micro_batches):
    model_dir = write_model_dir(tmp_path / "model")
    batch, arch = Rollouts(STEP, count=COUNT), load_arch(model_dir)
    with distributed(timeout_s=60) as parallel:
        recipe = make_recipe(model_dir, steps=9, memory={"lm_head_chunk_tokens": chunk})
        policy = TrainerPolicy(recipe, arch, parallel, model_dir=model_dir)
        policy.forward_backward(batch.shard(micro_batches=micro_batches))
        found = policy.take_ratios()
        assert policy.take_ratios() == []
    wanted = by_hand(arch, batch)
    assert len(found) == MOST_ROLLOUTS
    for each in found:
        assert each.log_ratios == pytest.approx(wanted[each.group, each.member], abs=2e-4)
    sampled = {rollout.rollouts[0]: rollout.token_ids[rollout.loss_mask != 0] for rollout in batch.rollouts}
    assert [each.digest for each in found] == [tokens_digest(sampled[each.group, each.member]) for each in found]
    # of all rollouts those with the lowest, the highest and the middle advantages
    advantages = {
        rollout.rollouts[0]: float(rollout.advantages[rollout.loss_mask != 0][0]) for rollout in batch.rollouts
    }
    order = sorted(advantages, key=lambda name: advantages[name])
    chosen = {order.index((each.group, each.member)) for each in found}
    assert chosen == {0, 1, 7, 8, 15, 16}


def test_long_rollouts_and_those_of_several_sequences_are_left_out(monkeypatch):
    batch = Rollouts(STEP, count=5)
    shard = batch.shard(micro_batches=2)
    first, second = shard.micro_batches
    # the first rollout has a second sequence, in the other micro-batch; the longest exceeds the limit
    names = [name for each in shard.micro_batches for name in each.rollouts]
    shared = msgspec.structs.replace(
        second, rollouts=[first.rollouts[0], *second.rollouts[1:]], sequences=[1, *(0 for _ in second.rollouts[1:])]
    )
    longest = max(int(rollout.loss_mask.sum()) for rollout in batch.rollouts)
    monkeypatch.setattr(ratio_sample, "MOST_TOKENS", longest - 1)
    sample = RatioSample.of_shard(msgspec.structs.replace(shard, micro_batches=[first, shared]))
    for number, each in enumerate((first, shared), start=1):
        sample.add(number, torch.zeros(int(each.loss_mask.sum())))
    kept = {(each.group, each.member) for each in sample.fetch()}
    long = {rollout.rollouts[0] for rollout in batch.rollouts if rollout.loss_mask.sum() == longest}
    assert kept
    assert kept == {*names} - long - {first.rollouts[0], second.rollouts[0]}


def test_a_batch_without_rollouts_has_none():
    sample = RatioSample.of_shard(Rollouts(STEP, count=1).shard(rank=1, world_size=2))
    sample.add(1, torch.zeros(0))
    assert sample.fetch() == []


def test_files_of_steps_are_replaced_and_damaged_ones_are_left_out(tmp_path: Path):
    run = RunDir(tmp_path)
    assert read_ratios(run) == {}
    writer = MetricsWriter(run, 2)
    for step in range(1, 2 * KEPT_STEPS + 4):
        writer.write_ratios(step, [RolloutRatios(step, 1, 7, [0.5, None])])
        assert reports.flush(20.0, directory=run.rollouts_dir / "ratios")
    writer.write_ratios(99, [])
    writer.close()
    newest = range(KEPT_STEPS + 4, 2 * KEPT_STEPS + 4)
    assert read_ratios(run) == {(step, step, 1): RolloutRatios(step, 1, 7, [0.5, None]) for step in newest}
    assert len(list((run.rollouts_dir / "ratios").iterdir())) == KEPT_STEPS
    damaged = [
        b'{"step": ',
        b"\x00" * 50,
        b"[" * 5000,
        b'{"step": 1, "attempt": 1, "rollouts": [{"group": "a"}]}',
        b" " * (2 << 20),
    ]
    for step, content in zip(newest, damaged, strict=False):
        ratios_path(run, step).write_bytes(content)
    ratios_path(run, newest[5]).unlink()
    ratios_path(run, newest[5]).mkdir()
    assert set(read_ratios(run)) == {(step, step, 1) for step in newest[6:]}
