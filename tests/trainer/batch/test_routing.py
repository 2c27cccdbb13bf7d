"""Where the trainer chooses other experts than the engines did, counted by token and layer."""

import msgspec
import numpy as np
import pytest
import torch
from trainer_testing import Rollouts, make_recipe, pack, run_ranks, tiny_arch, tiny_model, write_model_dir

from hpcrl.dock.routes import RoutedExperts, joined
from hpcrl.dock.wire import decode_shard, encode_shard
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.trainer.batch.routed_experts import RoutedExpertsComparison, engine_experts
from hpcrl.trainer.batch.tensors import TokenBatch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.policy import TrainerPolicy

LAYERS, WIDTH = 2, 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("routing") / "model")


def chosen(token_ids):
    """``[tokens, layers, experts_per_token]`` of the start model, one rollout at a time."""
    found = []
    attention = PackedAttention(torch.tensor([0, len(token_ids)]))
    ids = torch.from_numpy(token_ids.astype(np.int64))
    with torch.no_grad():
        tiny_model(tiny_arch())(ids, attention.context(record=lambda _, experts: found.append(experts)))
    return torch.stack(found, 1).numpy().astype(np.uint8)


def engine_rows(rollouts, *, change=lambda number, rows: None):
    """What an engine with the start model says of each rollout, last row missing, in another order of experts."""
    said = []
    for number, rollout in enumerate(rollouts):
        rows = chosen(rollout.token_ids)[..., ::-1].copy()
        change(number, rows)
        present = np.ones(len(rows), np.uint8)
        present[-1] = 0
        rows[-1] = 0
        said.append(RoutedExperts.of(rows, present))
    return said


def shards_of(rollouts, said, world_size=1):
    """Shards as they come over the wire."""
    shards = []
    for rank in range(world_size):
        shard = rollouts.shard(rank, world_size)
        routes = said[rank::world_size]
        micro_batches = []
        for i, micro_batch in enumerate(shard.micro_batches):
            own = routes[i :: len(shard.micro_batches)]
            lengths = np.diff(micro_batch.cu_seqlens).tolist()
            micro_batches.append(msgspec.structs.replace(micro_batch, routed_experts=joined(own, lengths)))
        shards.append(decode_shard(encode_shard(msgspec.structs.replace(shard, micro_batches=micro_batches))))
    return shards


def measure(model_dir, shard):
    with distributed(timeout_s=60) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=9), tiny_arch(), parallel, model_dir=model_dir)
        return policy.forward_backward(shard).reduce(parallel.world)


def test_equal_models_choose_equal_experts(model_dir):
    rollouts = Rollouts(4)
    metrics = measure(model_dir, shards_of(rollouts, engine_rows(rollouts.rollouts))[0])
    assert metrics.routing_mismatch == 0.0
    assert metrics.routed_tokens == rollouts.tokens - len(rollouts.rollouts)
    assert metrics.unknown_routing == {"last": pytest.approx(len(rollouts.rollouts) / rollouts.tokens)}
    # they were looked at alone
    assert metrics.replayed_share is None
    assert set(metrics.routing_mismatch_by_lag) == set(metrics.mismatch_kl_by_lag)
    assert set(metrics.routing_mismatch_by_lag.values()) == {0.0}


def other(rows, token, layer):
    """Put an expert there that was not chosen."""
    row = rows[token, layer]
    row[0] = next(expert for expert in range(4) if expert not in row)


def test_one_wrong_row_is_seen(model_dir):
    rollouts = Rollouts(4)
    trained = int(np.flatnonzero(rollouts.rollouts[2].loss_mask)[0])

    def change(number, rows):
        if number == 2:
            other(rows, trained - 1, 1)

    metrics = measure(model_dir, shards_of(rollouts, engine_rows(rollouts.rollouts, change=change))[0])
    pairs = metrics.routed_tokens * LAYERS
    assert metrics.routing_mismatch == pytest.approx(1 / pairs)
    rollout = rollouts.rollouts[2]
    crossed = rollout.versions[trained] != rollout.versions[0]
    bucket = "mixed" if crossed else str(3 - rollout.versions[trained])
    by_lag = metrics.routing_mismatch_by_lag
    assert {name for name, share in by_lag.items() if share} == {bucket}
    # every trained token is decided by the row before it, in each layer
    of_bucket = 0
    for each in rollouts.rollouts:
        mixed = each.versions != each.versions[0]
        names = np.where(mixed, "mixed", (3 - each.versions).astype(str))
        of_bucket += int(((names == bucket) & (each.loss_mask == 1)).sum())
    assert by_lag[bucket] == pytest.approx(1 / (of_bucket * LAYERS))


def test_rows_that_slipped_by_a_token_are_seen(model_dir):
    """The mistake that counts of rows do not show."""
    rollouts = Rollouts(4, count=12)

    def slip(number, rows):
        rows[:] = np.roll(rows, 1, axis=0)

    metrics = measure(model_dir, shards_of(rollouts, engine_rows(rollouts.rollouts, change=slip))[0])
    assert metrics.routing_mismatch > 0.2


def test_missing_rows_are_not_compared(model_dir):
    """Neither a row that no engine sent, whatever stands there, nor a rollout without any."""
    rollouts = Rollouts(4)
    said = engine_rows(rollouts.rollouts)
    experts, present = said[0].experts.copy(), said[0].known.copy().astype(np.uint8)
    for layer in range(LAYERS):
        other(experts, 0, layer)
    present[0] = 0
    lengths = [len(rollout.token_ids) for rollout in rollouts.rollouts]
    parts = [RoutedExperts.of(experts, present), None, *said[2:]]
    metrics = measure(model_dir, shards_of(rollouts, parts)[0])
    assert metrics.routing_mismatch == 0.0
    assert metrics.routed_tokens == sum(lengths) - len(lengths) - 1 - (lengths[1] - 1)
    # the first token of a rollout is of its prompt
    sampled = int(rollouts.rollouts[1].loss_mask[:-1].sum())
    counts = {"last": len(lengths), "sampled": sampled, "context": 1 + lengths[1] - 1 - sampled}
    assert metrics.unknown_routing == pytest.approx({kind: n / sum(lengths) for kind, n in counts.items()})


def test_without_rows_no_counter_is_reported(model_dir):
    rollouts = Rollouts(4)
    metrics = measure(model_dir, rollouts.shard())
    assert (metrics.routing_mismatch, metrics.routing_mismatch_by_lag, metrics.routed_tokens) == (None, {}, 0)
    assert (metrics.replayed_share, metrics.unknown_routing) == (None, {})


def test_comparing_changes_no_gradient(model_dir):
    rollouts = Rollouts(4)

    def gradients(shard):
        with distributed(timeout_s=60) as parallel:
            policy = TrainerPolicy(make_recipe(model_dir, steps=9), tiny_arch(), parallel, model_dir=model_dir)
            policy.forward_backward(shard)
            return [parameter.grad.full_tensor().clone() for parameter in policy.model.parameters()]

    with_rows = gradients(shards_of(rollouts, engine_rows(rollouts.rollouts))[0])
    assert all(torch.equal(a, b) for a, b in zip(with_rows, gradients(rollouts.shard()), strict=True))


def rank_measure(rank, model_dir, shards):
    with distributed(timeout_s=60) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=9), tiny_arch(), parallel, model_dir=model_dir)
        return policy.forward_backward(decode_shard(shards[rank])).reduce(parallel.world)


def test_ranks_add_up(model_dir):
    """One rollout: the second rank has nothing, and says the same."""
    for count in (1, 5):
        rollouts = Rollouts(4, count=count)

        def change(number, rows):
            other(rows, 0, 0)

        said = engine_rows(rollouts.rollouts, change=change)
        alone = measure(model_dir, shards_of(rollouts, said)[0])
        assert alone.routing_mismatch == pytest.approx(count / (alone.routed_tokens * LAYERS))
        shards = [encode_shard(shard) for shard in shards_of(rollouts, said, 2)]
        for metrics in run_ranks(2, rank_measure, model_dir, shards):
            assert metrics.routing_mismatch == pytest.approx(alone.routing_mismatch)
            assert metrics.routing_mismatch_by_lag == pytest.approx(alone.routing_mismatch_by_lag)
            assert metrics.routed_tokens == alone.routed_tokens


def batch_with(layers=LAYERS, width=WIDTH, *, dtype=np.uint8, tokens=None, put=None, known=True):
    """Two rollouts whose tokens have the first experts everywhere; ``put`` maps ``(token, layer)`` to others."""
    batch = pack(Rollouts(1, count=2).rollouts)
    tokens = tokens or len(batch.token_ids)
    experts = np.broadcast_to(np.arange(width), (tokens, layers, width)).astype(dtype)
    for place, row in (put or {}).items():
        experts[place] = row
    present = np.full(tokens, known, np.uint8)
    return msgspec.structs.replace(batch, routed_experts=RoutedExperts.of(experts, present))


def test_wide_experts_are_compared():
    arch = tiny_arch(num_experts=384)
    experts = engine_experts(batch_with(dtype=np.uint16, put={(2, 1): [0, 383]}), arch)
    # torch sorts no wider unsigned integers
    assert experts.experts.dtype == torch.int16
    comparison = RoutedExpertsComparison(experts)
    for layer in range(LAYERS):
        comparison(layer, torch.tensor([1, 0]).expand(len(experts.known), WIDTH))
    assert comparison.differing.nonzero().tolist() == [[2]]


SECOND = len(Rollouts(1, count=2).rollouts[0].token_ids)
#: the wrong record, what is said of it
BROKEN = {
    "too few layers": ({"layers": 1}, "2 experts a token in 1 layers; the trainer's model has 2 in 2\n.*hint: "),
    "too many layers": ({"layers": 3}, "2 experts a token in 3 layers; the trainer's model has 2 in 2\n.*hint: "),
    "another width": ({"width": 1}, "1 experts a token in 2 layers; the trainer's model has 2 in 2\n.*hint: "),
    "other tokens": ({"tokens": 3}, "has 3 rows of routed experts"),
    "beyond the last expert": (
        {"put": {(SECOND + 1, 1): [0, 4]}},
        r"experts \[0, 4\] of token 1 in layer 1 of rollout 1 of group 1: the model has 4\n.*hint: ",
    ),
    # a buffer that the engine never wrote to
    "zeros": (
        {"put": {(SECOND - 1, 0): [0, 0]}},
        rf"experts \[0, 0\] of token {SECOND - 1} in layer 0 of rollout 0 of group 1: an expert occurs twice",
    ),
}


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_record_is_refused_by_rollout_and_layer(change):
    how, what = BROKEN[change]
    with pytest.raises(ValueError, match=what):
        TokenBatch.from_wire(batch_with(**how), tiny_arch())


def test_what_stands_in_unknown_rows_does_not_matter():
    batch = TokenBatch.from_wire(batch_with(put={(1, 1): [9, 9]}, known=False), tiny_arch())
    assert not batch.routes.known.any()
