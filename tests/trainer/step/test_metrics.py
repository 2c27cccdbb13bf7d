"""Token metrics are means over tokens, however tokens are spread over micro-batches and ranks."""

import math
import random

import msgspec
import numpy as np
import pytest
import torch
from trainer_testing import Rollouts, make_recipe, run_ranks, tiny_arch, write_model_dir

from hpcrl.dock.ledger.digest import digest_of
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.losses import PolicyLoss
from hpcrl.trainer.step.metrics import TokenSums
from hpcrl.trainer.step.policy import TrainerPolicy

VERSION = 7
CPU = torch.device("cpu")


def make_tokens(count=40, seed=0):
    rng = random.Random(seed)
    return [
        {
            "log_ratio": rng.gauss(0, 0.5),
            "entropy": rng.random(),
            "masked": rng.random() < 0.3,
            "version": VERSION - rng.choice([0, 0, 1, 3]),
            "crossed": rng.random() < 0.2,
        }
        for _ in range(count)
    ]


def add(sums, tokens, loss=0.25):
    environments = torch.tensor([t.get("environment", -1) for t in tokens], dtype=torch.int64)
    sums.add(
        PolicyLoss(
            torch.tensor(loss),
            torch.tensor([t["masked"] for t in tokens], dtype=torch.bool),
            torch.tensor([t["log_ratio"] for t in tokens]),
        ),
        torch.tensor([t["entropy"] for t in tokens]),
        torch.tensor([t["version"] for t in tokens], dtype=torch.int64),
        torch.tensor([t["version"] - t.get("crossed", False) for t in tokens], dtype=torch.int64),
        environments,
    )


def check(metrics, tokens, parts):
    n = len(tokens)
    ratios = [math.exp(t["log_ratio"]) for t in tokens]
    k3 = [r - 1 - t["log_ratio"] for r, t in zip(ratios, tokens, strict=True)]
    assert metrics.tokens == n
    assert metrics.loss == pytest.approx(0.25 * parts)
    assert metrics.entropy == pytest.approx(sum(t["entropy"] for t in tokens) / n, rel=1e-6)
    assert metrics.masked_share == pytest.approx(sum(t["masked"] for t in tokens) / n)
    assert metrics.masked_low_share == pytest.approx(sum(t["masked"] and t["log_ratio"] < 0 for t in tokens) / n)
    assert metrics.masked_high_share == pytest.approx(sum(t["masked"] and t["log_ratio"] > 0 for t in tokens) / n)
    assert metrics.mismatch_kl == pytest.approx(sum(k3) / n, rel=1e-5)
    assert metrics.ess == pytest.approx(sum(ratios) ** 2 / (n * sum(r * r for r in ratios)), rel=1e-6)
    assert set(metrics.mismatch_kl_by_lag) == {"0", "1", "3", "mixed"}
    for lag, value in metrics.mismatch_kl_by_lag.items():
        of_lag = [
            k
            for k, t in zip(k3, tokens, strict=True)
            if lag == ("mixed" if t["crossed"] else str(VERSION - t["version"]))
        ]
        assert value == pytest.approx(sum(of_lag) / len(of_lag), rel=1e-5)


def test_micro_batches_add_up():
    tokens = make_tokens()
    with distributed(timeout_s=20) as parallel:
        sums = TokenSums(VERSION, longest_lag=3)
        for part in (tokens[:3], tokens[3:29], tokens[29:], []):
            add(sums, part)
        check(sums.reduce(parallel.world), tokens, 4)


def rank_digests(rank):
    with distributed(timeout_s=20) as parallel:
        names = [(group, member) for group in range(50) for member in range(8)]
        mine = names[:300] if rank == 0 else names[:299:-1]
        found = [TokenSums(VERSION, rollouts=each).reduce(parallel.world) for each in (mine, mine if rank else [])]
        return [metrics.rollouts_digest for metrics in found], digest_of(names), digest_of(names[300:])


def test_ranks_add_up_which_rollouts_they_had():
    for found, all_, of_one in run_ranks(2, rank_digests):
        assert found == [all_, of_one]
        assert all_ != of_one


def rank_metrics(rank):
    with distributed(timeout_s=20) as parallel:
        sums, tokens = TokenSums(VERSION, longest_lag=3), make_tokens()
        # uneven on purpose: a mean of means would differ; the second rank alone has the largest lag or none
        for part in (tokens[:31],) if rank == 0 else (tokens[31:35], tokens[35:]):
            add(sums, part)
        # ranks need not know the lags of others
        nothing = TokenSums(VERSION, longest_lag=3 * rank)
        if rank == 1:
            add(nothing, tokens)
        return sums.reduce(parallel.world), nothing.reduce(parallel.world)


def test_ranks_add_up():
    for uneven, one_sided in run_ranks(2, rank_metrics):
        check(uneven, make_tokens(), 3)
        check(one_sided, make_tokens(), 1)


def test_masked_tokens_count_as_low_or_high_by_their_log_ratio():
    with distributed(timeout_s=20) as parallel:
        sums = TokenSums(VERSION)
        ratios = [(-1.0, True), (-2.0, True), (-0.5, True), (3.0, True), (0.0, True), (-1.0, False), (2.0, False)]
        tokens = [{"log_ratio": r, "entropy": 1.0, "masked": m, "version": VERSION} for r, m in ratios]
        add(sums, [*tokens, {**tokens[0], "log_ratio": math.nan}])
        metrics = sums.reduce(parallel.world)
    # the one with an equal probability is in neither
    shares = (metrics.masked_share, metrics.masked_low_share, metrics.masked_high_share)
    assert shares == pytest.approx((5 / 7, 3 / 7, 1 / 7))


def test_nothing_trained():
    with distributed(timeout_s=20) as parallel:
        metrics = TokenSums(VERSION).reduce(parallel.world)
    assert (metrics.tokens, metrics.loss, metrics.ess, metrics.mismatch_kl_by_lag) == (0, 0.0, 0.0, {})


def test_equal_policies_have_no_mismatch():
    with distributed(timeout_s=20) as parallel:
        sums = TokenSums(VERSION)
        add(sums, [{"log_ratio": 0.0, "entropy": 1.0, "masked": False, "version": VERSION}] * 5)
        metrics = sums.reduce(parallel.world)
    assert (metrics.ess, metrics.mismatch_kl) == (1.0, 0.0)


def test_what_is_not_finite_is_counted_and_spoils_no_mean():
    good = make_tokens()
    bad = [{**good[0], "log_ratio": math.nan}, {**good[1], "entropy": math.inf}]
    with distributed(timeout_s=20) as parallel:
        sums = TokenSums(VERSION, longest_lag=3)
        add(sums, [*good[:4], *bad])
        add(sums, good[4:])
        add(sums, [], loss=math.nan)
        metrics = sums.reduce(parallel.world)
    assert metrics.nonfinite_tokens == 2
    check(metrics, good, 2)


def test_tokens_of_the_future_are_refused():
    shard = Rollouts(5).shard()
    sampled = np.flatnonzero(shard.micro_batches[1].loss_mask)
    assert TokenSums.of_shard(shard, CPU)._lags.shape[-1] == 2 + 2
    shard.micro_batches[1].versions[sampled[-1]] = 5
    with pytest.raises(ValueError, match=r"version 5, the trainer is at 4"):
        TokenSums.of_shard(shard, CPU)


NAMES = ("rare", "often", "absent")


def by_environment(tokens):
    """The second rank alone has tokens of the rare environment, and some tokens are of none."""
    return [{**t, "environment": (0 if i > 35 else -1 if i == 20 else 1)} for i, t in enumerate(tokens)]


def rank_environments(rank):
    with distributed(timeout_s=20) as parallel:
        tokens = by_environment(make_tokens())
        sums = TokenSums(VERSION, longest_lag=3, environments=NAMES)
        for part in (tokens[:31],) if rank == 0 else (tokens[31:], [{**tokens[-1], "log_ratio": math.nan}]):
            add(sums, part)
        return sums.reduce(parallel.world)


def test_each_environment_has_the_means_of_its_tokens():
    tokens = by_environment(make_tokens())
    for found in run_ranks(2, rank_environments):
        assert set(found.entropy_by_env) == set(found.mismatch_kl_by_env) == {"rare", "often"}
        for number, name in enumerate(NAMES[:2]):
            own = [t for t in tokens if t["environment"] == number]
            k3 = [math.exp(t["log_ratio"]) - 1 - t["log_ratio"] for t in own]
            assert found.entropy_by_env[name] == pytest.approx(sum(t["entropy"] for t in own) / len(own), rel=1e-6)
            assert found.mismatch_kl_by_env[name] == pytest.approx(sum(k3) / len(own), rel=1e-5)


def test_a_batch_without_environments_has_no_means_of_them():
    with distributed(timeout_s=20) as parallel:
        sums = TokenSums(VERSION, longest_lag=3)
        add(sums, by_environment(make_tokens()))
        metrics = sums.reduce(parallel.world)
    assert (metrics.entropy_by_env, metrics.mismatch_kl_by_env) == ({}, {})


def test_a_policy_measures_the_tokens_of_each_environment(tmp_path):
    """The whole way, from the groups of a batch to its record: two environments weigh as many tokens as they have."""
    model_dir = write_model_dir(tmp_path / "model", tiny_arch())
    shard = Rollouts(2, count=5).shard()
    micro_batches = [
        msgspec.structs.replace(each, rollouts=[(member % 2, member) for _, member in each.rollouts])
        for each in shard.micro_batches
    ]
    stats = msgspec.structs.replace(shard.stats, environments={"even": [0], "odd": [1]})
    trained = {0: 0, 1: 0}
    for micro_batch in micro_batches:
        for number, (group, _) in enumerate(micro_batch.rollouts):
            begin, end = micro_batch.cu_seqlens[number : number + 2]
            trained[group] += int(micro_batch.loss_mask[begin:end].sum())
    with distributed(timeout_s=20) as parallel:
        recipe = make_recipe(model_dir, steps=2)
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        batch = msgspec.structs.replace(shard, micro_batches=micro_batches, stats=stats)
        found = policy.forward_backward(batch).reduce(parallel.world)
    for whole, parts in ((found.entropy, found.entropy_by_env), (found.mismatch_kl, found.mismatch_kl_by_env)):
        total = parts["even"] * trained[0] + parts["odd"] * trained[1]
        assert total / (trained[0] + trained[1]) == pytest.approx(whole, rel=1e-6)
        assert parts["even"] != pytest.approx(parts["odd"], rel=1e-6)
