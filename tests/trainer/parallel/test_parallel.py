"""One rank or two, one micro-batch or several: the same losses, gradients and weights."""

import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_testing import Rollouts, make_recipe, run_ranks, write_model_dir

from hpcrl.errors import PeerLostError
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed, is_lost_rank
from hpcrl.trainer.step.nonfinite import NonFiniteGradientError
from hpcrl.trainer.step.policy import TrainerPolicy

STEPS = 3
#: float32 sums in another order; gradients are of the order 1, weights move by 1e-3 a step
GRADIENT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
WEIGHT_TOLERANCE = {"rtol": 0.0, "atol": 5e-6}


def train_steps(rank, model_dir, micro_batches=2, count=6, **trainer):
    """Losses, norms, the first gradient and the last weights of three steps."""
    recipe = make_recipe(model_dir, steps=STEPS, **trainer)
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        losses, norms, gradients = [], [], {}
        for step in range(1, STEPS + 1):
            data = parallel.data
            shard = Rollouts(step, count=count).shard(data.rank, data.size, micro_batches=micro_batches)
            losses.append(policy.forward_backward(shard).reduce(parallel.world))
            if step == 1:
                gradients = {n: p.grad.full_tensor().clone() for n, p in policy.model.named_parameters()}
            norms.append(policy.optimizer_step(step)[0])
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in policy.model.parameters())
        weights = {n: p.detach().full_tensor().clone() for n, p in policy.model.named_parameters()}
        # plain lists: shared-memory tensors would outlive the process that made them
        return losses, norms, *({n: t.tolist() for n, t in d.items()} for d in (gradients, weights))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("parallel") / "model")


@pytest.fixture(scope="module")
def one_rank(model_dir):
    return train_steps(0, model_dir)


def assert_same(run, reference):
    for a, b in zip(run[0], reference[0], strict=True):
        assert a.tokens == b.tokens
        assert a.loss == pytest.approx(b.loss, rel=1e-4, abs=1e-6)
        assert a.entropy == pytest.approx(b.entropy, rel=1e-5)
        assert a.mismatch_kl == pytest.approx(b.mismatch_kl, rel=1e-4)
    assert run[1] == pytest.approx(reference[1], rel=1e-4)
    for name in reference[2]:
        torch.testing.assert_close(torch.tensor(run[2][name]), torch.tensor(reference[2][name]), **GRADIENT_TOLERANCE)
        torch.testing.assert_close(torch.tensor(run[3][name]), torch.tensor(reference[3][name]), **WEIGHT_TOLERANCE)


@pytest.mark.parametrize("micro_batches", [1, 3, 9])
def test_micro_batches_change_nothing(model_dir, one_rank, micro_batches):
    assert_same(train_steps(0, model_dir, micro_batches), one_rank)


def test_two_ranks_change_nothing(model_dir, one_rank):
    for run in run_ranks(2, train_steps, model_dir):
        assert_same(run, one_rank)


def test_ranks_without_data_join_in(model_dir):
    """One rollout for two ranks and two micro-batches: three of four are empty."""
    expected = train_steps(0, model_dir, 1, 1)
    for run in run_ranks(2, train_steps, model_dir, 2, 1):
        assert_same(run, expected)


def test_every_parameter_has_a_gradient(one_rank):
    assert all(torch.tensor(gradient).abs().max() > 0 for gradient in one_rank[2].values())


def test_bfloat16_keeps_float32_masters(model_dir, one_rank):
    losses, norms, *_ = train_steps(0, model_dir, dtype="bfloat16")
    assert [m.loss for m in losses] != [m.loss for m in one_rank[0]]
    assert [m.entropy for m in losses] == pytest.approx([m.entropy for m in one_rank[0]], rel=0.02)
    assert norms == pytest.approx(one_rank[1], rel=0.1)


class Copies(TorchDispatchMode):
    """Elements of what is copied from one place to another."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() != args[1].data_ptr():
            self.seen.add(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_that_has_all_does_not_copy_gradients_to_where_they_are(model_dir, dtype):
    recipe = make_recipe(model_dir, steps=STEPS, dtype=dtype)
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        with Copies() as copies:
            policy.forward_backward(Rollouts(1, count=6).shard(micro_batches=2))
        # FSDP2 puts gradients of a layer behind each other
        layers = {sum(parameter.numel() for parameter in layer.parameters()) for layer in policy.model.layers}
    assert copies.seen
    assert not copies.seen & layers


def bfloat16_step(rank, model_dir):
    return train_steps(rank, model_dir, 1, dtype="bfloat16")[2]


def test_gradients_of_ranks_are_added_in_float32(model_dir):
    """A sum of two bfloat16 gradients is, as a rule, not a bfloat16 number."""
    gradients, _ = run_ranks(2, bfloat16_step, model_dir)
    whole = torch.cat([torch.tensor(g).flatten() for g in gradients.values()])
    assert (whole != whole.bfloat16().float()).float().mean() > 0.2


def test_a_gradient_that_is_not_finite_changes_no_weight(model_dir):
    with distributed(timeout_s=120) as parallel:
        recipe = make_recipe(model_dir, steps=1)
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        policy.forward_backward(Rollouts(1).shard())
        parameters = list(policy.model.parameters())
        before = [p.detach().full_tensor().clone() for p in parameters]
        parameters[3].grad.to_local()[0, 0] = float("nan")
        with pytest.raises(NonFiniteGradientError, match="gradient norm of step 1 is nan"):
            policy.optimizer_step(1)
        assert all(torch.equal(a, p.detach().full_tensor()) for a, p in zip(before, parameters, strict=True))


def fail_on_rank_1(rank):
    def action():
        if rank == 1:
            raise OSError(28, "No space left on device")
        return rank

    with distributed(timeout_s=20) as parallel:
        assert parallel.world.on_leader(lambda: rank + 5, "asking") == 5
        assert parallel.world.all_succeed(lambda: rank * 2, "counting") == [0, 2]
        parallel.world.all_succeed(action, "writing")


def test_a_failure_of_one_rank_is_known_to_all():
    (first, second) = run_ranks(2, fail_on_rank_1, fails=True)
    assert first == ("PeerLostError", "writing failed on trainer rank 1: OSError: [Errno 28] No space left on device")
    assert second[0] == "OSError"


def lose_rank_1(rank):
    with distributed(timeout_s=20) as parallel:
        if rank == 1:
            raise KeyError("the cause")
        try:
            parallel.world.sum(torch.zeros(1))
        except RuntimeError as error:
            raise (PeerLostError if is_lost_rank(error) else ValueError)(error) from error


def test_a_dead_rank_is_recognised():
    first, second = run_ranks(2, lose_rank_1, fails=True)
    assert (first[0], second[0]) == ("PeerLostError", "KeyError")
    assert not is_lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_rank(ValueError("gloo Connection"))


def test_nothing_is_left_of_the_group():
    with distributed(timeout_s=20) as parallel:
        assert parallel.world.size == 1
    assert not dist.is_initialized()


@pytest.fixture
def rank_of_two(monkeypatch):
    """Become one of two ranks, of which the other never comes."""

    def become(rank, port):
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in named.items():
            monkeypatch.setenv(name, str(value))

    return become


def test_who_comes_first_is_not_a_cause_where_the_others_do_not(rank_of_two):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rank_of_two(0, port)
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"), distributed(timeout_s=1):
            pass
    rank_of_two(1, port)
    with pytest.raises(PeerLostError, match="rank 0 of the trainer is unreachable"), distributed(timeout_s=1):
        pass
    rank_of_two(0, port)
    with pytest.raises(PeerLostError, match="not all ranks of the trainer joined"), distributed(timeout_s=1):
        pass


def test_rank_0_serves_on_the_port_of_the_attempt_before():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for _ in range(2):
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
        client = dist.TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
        client.set("key", "value")
        # the server closes first, and its end of the connection stays in TIME_WAIT
        del store
        del client
