"""Packed attention, micro-batches as tensors, log-probabilities of sampled tokens."""

import itertools

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from trainer_testing import VOCAB, Rollouts, pack, tiny_arch, tiny_model

from hpcrl.dock.wire import MicroBatch
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.memory import transfer
from hpcrl.trainer.batch.tensors import TokenBatch, token_logprobs


def loop_attention(q, k, v, cu_seqlens):
    """One sequence, one head, one query at a time."""
    out = torch.zeros_like(q)
    share = q.shape[1] // k.shape[1]
    for start, end in itertools.pairwise(cu_seqlens):
        for head in range(q.shape[1]):
            for t in range(start, end):
                scores = k[start : t + 1, head // share] @ q[t, head] / q.shape[2] ** 0.5
                out[t, head] = scores.softmax(0) @ v[start : t + 1, head // share]
    return out


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("cu_seqlens", [[0, 5], [0, 1, 8, 11], [0, 3, 3 + 9, 13]])
def test_attention_equals_the_loop(heads, cu_seqlens):
    torch.manual_seed(0)
    shapes = [(cu_seqlens[-1], h, 8) for h in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    fast = PackedAttention(torch.tensor(cu_seqlens))(0, *inputs)
    slow = loop_attention(*inputs, cu_seqlens)
    assert torch.allclose(fast, slow, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad(fast, inputs, weights), torch.autograd.grad(slow, inputs, weights), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_positions_restart():
    attention = PackedAttention(torch.tensor([0, 2, 5]))
    assert attention.positions.tolist() == [0, 1, 0, 1, 2]
    assert attention.sequences.tolist() == [0, 0, 1, 1, 1]


def test_logprobs_equal_one_rollout_at_a_time():
    """Packing changes nothing: every sampled token is predicted by the tokens before it in its own rollout."""
    model, rollouts = tiny_model(tiny_arch()), Rollouts(3, count=5).rollouts
    batch = TokenBatch.from_wire(pack(rollouts))
    logits = model(batch.input_ids, batch.context())
    packed, _ = token_logprobs(logits, batch.targets, 0.7)
    expected = []
    for rollout in rollouts:
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
        for t in np.flatnonzero(rollout.loss_mask):
            attention = PackedAttention(torch.tensor([0, t]))
            last = model(ids[:t], attention.context())[-1]
            expected.append(F.log_softmax(last / 0.7, -1)[ids[t]])
    assert torch.allclose(packed, torch.stack(expected), atol=2e-6)


def test_tensors_of_trained_tokens():
    rollouts = Rollouts(4, count=3).rollouts
    wire = pack(rollouts)
    batch = TokenBatch.from_wire(wire)
    trained = np.flatnonzero(wire.loss_mask)
    assert batch.num_trained == len(trained)
    assert batch.select.tolist() == (trained - 1).tolist()
    assert batch.targets.tolist() == wire.token_ids[trained].tolist()
    assert batch.versions.tolist() == wire.versions[trained].tolist()
    first = [int(wire.versions[start]) for start in wire.cu_seqlens[:-1]]
    assert batch.context_versions.tolist() == [first[i] for i in batch.sequences.tolist()]
    assert batch.engine_logprobs.tolist() == wire.logprobs[trained].tolist()
    assert batch.advantages.tolist() == wire.advantages[trained].tolist()
    owners = np.searchsorted(wire.cu_seqlens, trained, side="right") - 1
    assert batch.sequences.tolist() == owners.tolist()


@pytest.mark.parametrize("empty", [True, False])
def test_nothing_to_train_still_runs_through_the_model(empty):
    wire = pack([]) if empty else Rollouts(1, count=2).rollouts[0]
    wire = msgspec.structs.replace(wire, loss_mask=np.zeros(len(wire.token_ids), np.uint8))
    batch = TokenBatch.from_wire(wire)
    assert batch.num_trained == 0
    model = tiny_model(tiny_arch())
    logits = model(batch.input_ids, batch.context())
    assert logits.shape == (1, VOCAB)
    (logits.sum() * 0.0).backward()
    assert all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.zeros(3, np.float32)}, "3 logprobs"),
        ({"loss_mask": np.ones(6, np.uint8)}, "first token"),
        ({"cu_seqlens": np.array([0, 5], np.int32)}, "cu_seqlens"),
        ({"cu_seqlens": np.array([0, 6, 6], np.int32)}, "cu_seqlens"),
        ({"cu_seqlens": np.array([6], np.int32)}, "cu_seqlens"),
    ],
)
def test_malformed_micro_batches_are_refused(change, message):
    good = {
        "token_ids": np.arange(6, dtype=np.int32),
        "cu_seqlens": np.array([0, 6], np.int32),
        "loss_mask": np.array([0, 1, 1, 1, 1, 1], np.uint8),
        "logprobs": np.zeros(6, np.float32),
        "versions": np.zeros(6, np.int32),
        "advantages": np.zeros(6, np.float32),
    }
    with pytest.raises(ValueError, match=message):
        TokenBatch.from_wire(MicroBatch(**{**good, **change}))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_token_logprobs_and_entropy(temperature):
    torch.manual_seed(1)
    logits = (torch.randn(7, 11, dtype=torch.float64) * 3).requires_grad_()
    targets = torch.randint(0, 11, (7,))
    logprobs, entropies = token_logprobs(logits, targets, temperature)
    every = F.log_softmax(logits / temperature, -1)
    assert torch.allclose(logprobs, every[torch.arange(7), targets], rtol=1e-12)
    assert torch.allclose(entropies, -(every.exp() * every).sum(-1), rtol=1e-10)
    assert not entropies.requires_grad
    (a,) = torch.autograd.grad(logprobs.sum(), logits, retain_graph=True)
    (b,) = torch.autograd.grad(every[torch.arange(7), targets].sum(), logits)
    assert torch.allclose(a, b, rtol=1e-10)


def test_arrays_of_every_kind_travel_side_by_side():
    tensors = [
        torch.arange(7),
        torch.tensor([True, False, True]),
        torch.zeros(0, 3, dtype=torch.int32),
        torch.arange(30, dtype=torch.uint8).view(5, 3, 2),
        torch.tensor(2.5),
        torch.linspace(0, 1, 9)[::2],
    ]
    together = transfer._together(tensors, pinned=False)
    assert together.dim() == 1
    for found, tensor in zip(transfer._apart(together.clone(), tensors), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_a_batch_moves_with_all_that_its_attention_has():
    batch = TokenBatch.from_wire(pack(Rollouts(3, count=3).rollouts))
    moved = batch.to(torch.device("meta"))
    places = vars(moved.attention)
    assert {name for name, value in places.items() if isinstance(value, torch.Tensor)} == {"positions", "sequences"}
    assert {tensor.device.type for tensor in (*moved[:1], moved.targets, places["positions"])} == {"meta"}
    # what the host knew it still knows, and what was moved is still there
    assert (moved.attention.starts, moved.num_trained) == (batch.attention.starts, batch.num_trained)
    assert batch.attention.positions.device.type == "cpu"
