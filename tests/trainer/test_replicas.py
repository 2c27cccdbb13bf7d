"""Copies of the parameters (HSDP), as a recipe asks for them: from the published model to checkpoint and hand-off."""

import torch
from test_checkpoint import one_step, save, state_of
from test_families import add_mtp, published
from test_publish import make_publisher
from trainer_testing import make_recipe, run_ranks, tiny_arch, write_model_dir

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.store import HandoffStore

RANKS = 4
COPIES = {"dp_replicate": 2, "ep": 2}


def bytes_of(entry):
    return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())


def restore(rank, model_dir, root, parallelism):
    """What is restored onto a mesh, one more step from it, and what it publishes."""
    recipe = make_recipe(model_dir, steps=9, parallelism=parallelism)
    with distributed(timeout_s=30, parallelism=recipe.trainer.parallelism) as parallel:
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
