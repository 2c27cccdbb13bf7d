"""Copies of the parameters (HSDP), as a recipe asks for them: from the published model to checkpoint and hand-off."""

from contextlib import nullcontext
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from test_checkpoint import one_step, save, state_of, whole
from test_families import add_mtp, published
from test_publish import make_publisher
from trainer_testing import Rollouts, make_recipe, run_ranks, tiny_arch, write_model_dir

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.step import policy as policy_module
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.store import HandoffStore

RANKS = 4
COPIES = {"dp_replicate": 2, "ep": 2}


def bytes_of(entry):
    return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())


def restore(rank, model_dir, root, parallelism):
    """What is restored onto a mesh, one more step from it, and what it publishes."""
    recipe = make_recipe(model_dir, steps=9, parallelism=parallelism)
    with distributed(timeout_s=120, parallelism=recipe.trainer.parallelism) as parallel:
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=None)
        load_checkpoint(CheckpointLedger(root).newest_verified().entry, policy.model, policy.optimizer, parallel)
        restored = state_of(policy)
        publisher = make_publisher(HandoffStore(root / f"weights-{parallel.world.size}"), parallel, model_dir)
        publisher.publish(policy.model, 2)
        publisher.wait()
        shards = parallel.sharding.size, parallel.data.size
        return restored, one_step(policy, parallel, 3), shards


def test_copies_train_save_publish_and_restore_as_one_rank(tmp_path):
    model_dir = write_model_dir(tmp_path / "model", tiny_arch(num_experts=4))
    names = add_mtp(model_dir, f"model.layers.{load_arch(model_dir).num_hidden_layers}")
    run_ranks(RANKS, save, model_dir, tmp_path / "copies", parallelism=COPIES, timeout_s=120.0)
    run_ranks(RANKS // 2, save, model_dir, tmp_path / "shards", parallelism={"ep": 2}, timeout_s=120.0)
    # of two copies one is written, as where there is one
    copied, sharded = (bytes_of(tmp_path / name / "step-000002") for name in ("copies", "shards"))
    assert abs(copied / sharded - 1.0) < 0.1
    ranks = run_ranks(RANKS, restore, model_dir, tmp_path / "copies", COPIES, timeout_s=120.0)
    restored, loss, _ = restore(0, model_dir, tmp_path / "copies", {})
    for state, after, shards in ranks:
        assert shards == (2, RANKS)
        assert state.keys() == restored.keys()
        assert all(state[name] == restored[name] for name in state if name != "rng")
        assert abs(after - loss) < 1e-4 * abs(loss) + 1e-6
    of_copies, of_one = (published(tmp_path / "copies" / f"weights-{size}" / "v000002") for size in (RANKS, 1))
    assert of_copies.keys() == of_one.keys() > names
    assert all(torch.equal(of_copies[name], of_one[name]) for name in of_one)


def gradients_of_equal_micro_batches(rank, model_dir):
    """Of a step of two equal micro-batches, with copies summed once and after each; and how often they were."""
    recipe = make_recipe(model_dir, steps=9, parallelism={"dp_replicate": 2})
    with distributed(timeout_s=120, parallelism=recipe.trainer.parallelism) as parallel:
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        shard = Rollouts(3).shard(rank, 2, micro_batches=1)
        shard = msgspec.structs.replace(shard, micro_batches=shard.micro_batches * 2)
        copies = parallel.mesh.get_mesh("dp_replicate").get_group()
        found = []
        for patch in (nullcontext(), mock.patch.object(policy_module, "sum_over_copies")):
            with patch, mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
                policy.forward_backward(shard)
            count = sum(call.kwargs.get("group") == copies for call in reduce.call_args_list)
            found.append((count, [whole(parameter.grad).tolist() for parameter in policy.model.parameters()]))
            policy.optimizer.zero_grad()
        return found


def test_copies_are_summed_once_a_step(tmp_path):
    """Twice the same number is exact in any order: gradients are equal to the last bit."""
    model_dir = write_model_dir(tmp_path / "model")
    for once, each in run_ranks(2, gradients_of_equal_micro_batches, model_dir):
        # layers, the embedding, norm and head
        groups = load_arch(model_dir).num_hidden_layers + 2
        assert (once[0], each[0]) == (groups, 2 * groups)
        assert once[1] == each[1]
        assert any(any(row) for row in once[1])
