"""Joint checkpoints: bit-equal on any number of ranks; no half entry."""

import msgspec
import pytest
import torch
from torch.distributed.tensor import DTensor
from trainer_testing import Rollouts, make_recipe, run_ranks, tiny_arch, write_model_dir

from hpcrl.checkpoints import CheckpointEntry, CheckpointLedger, CheckpointWriter
from hpcrl.config.recipe import CheckpointConfig
from hpcrl.errors import CheckpointError
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.state.restore import choose_checkpoint
from hpcrl.trainer.state.saver import CheckpointSaver
from hpcrl.trainer.step.policy import TrainerPolicy


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(policy):
    """Everything a checkpoint must bring back, as lists of exact floats."""
    state = {}
    for name, parameter in policy.model.named_parameters():
        state[name] = whole(parameter).tolist()
        for key, value in policy.optimizer.state[parameter].items():
            state[f"{name}/{key}"] = whole(value).tolist()
    state |= {name: whole(buffer).tolist() for name, buffer in policy.model.named_buffers()}
    state["rng"] = torch.get_rng_state().tolist()
    return state


def one_step(policy, parallel, step):
    shard = Rollouts(step).shard(parallel.data.rank, parallel.data.size)
    metrics = policy.forward_backward(shard).reduce(parallel.world)
    policy.optimizer_step(step)
    return metrics.loss


def save(rank, model_dir, root, *, steps=2, state=b"orchestrator", fail=False, mode="async", keep_last=2, **trainer):
    recipe = make_recipe(model_dir, steps=9, **trainer)
    with distributed(timeout_s=120, parallelism=recipe.trainer.parallelism) as parallel:
        torch.manual_seed(5)
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        for step in range(1, steps + 1):
            one_step(policy, parallel, step)
        torch.rand(3)

        def orchestrator_state():
            assert rank == 0
            if fail:
                raise OSError(5, "no answer")
            return state

        writer = parallel.world.on_leader(lambda: CheckpointWriter.claim(root, 1), "claiming")
        config = CheckpointConfig(mode=mode, keep_last=keep_last)
        saver = CheckpointSaver(writer, parallel.world, config, lambda kind, **data: None)
        saver.start(policy, steps, orchestrator_state=orchestrator_state)
        saved = state_of(policy)
        # while it is being written
        loss = one_step(policy, parallel, steps + 1)
        if (error := saver.wait(30.0)) is not None:
            raise error
        return saved, loss


def load(rank, model_dir, root):
    entry = CheckpointLedger(root).newest_verified().entry
    with distributed(timeout_s=120) as parallel:
        torch.manual_seed(99)
        policy = TrainerPolicy(make_recipe(model_dir, steps=9), load_arch(model_dir), parallel, model_dir=None)
        load_checkpoint(entry, policy.model, policy.optimizer, parallel)
        return state_of(policy), one_step(policy, parallel, entry.step + 1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_bit_equal_on_one_rank_and_on_two(model_dir, tmp_path, mode):
    saved, loss = save(0, model_dir, tmp_path, mode=mode)
    entry = CheckpointLedger(tmp_path).newest_verified().entry
    assert entry.orchestrator_state() == b"orchestrator"
    assert (0 < entry.manifest.blocked_s <= entry.manifest.save_s) is True
    assert load(0, model_dir, tmp_path) == (saved, loss)
    for state, next_loss in run_ranks(2, load, model_dir, tmp_path):
        assert state == saved
        assert next_loss == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_with_tied_embeddings_resumes(tmp_path, ranks):
    """Head and embeddings stay one parameter, also where they are made without data for a checkpoint to fill."""
    model_dir = write_model_dir(tmp_path / "model", tiny_arch(tie_word_embeddings=True))
    before = run_ranks(ranks, save, model_dir, tmp_path / "checkpoints")
    after = run_ranks(ranks, load, model_dir, tmp_path / "checkpoints")
    assert "lm_head.weight" not in before[0][0]
    assert after == before


def test_every_rank_hashes_what_it_writes(model_dir, tmp_path):
    run_ranks(2, save, model_dir, tmp_path)
    entry = CheckpointLedger(tmp_path).newest_verified().entry
    names = {str(path.relative_to(entry.path)) for path in entry.path.rglob("*") if path.is_file()}
    assert set(entry.manifest.files) == names - {"manifest.json"}
    assert {"trainer/__0_0.distcp", "trainer/__1_0.distcp", "trainer/.metadata"} <= names
    entry.verify(content=True)


def test_two_ranks_to_one(model_dir, tmp_path):
    (saved, loss), _ = run_ranks(2, save, model_dir, tmp_path)
    state, next_loss = load(0, model_dir, tmp_path)
    assert state == saved
    assert next_loss == pytest.approx(loss, rel=1e-4)
    assert CheckpointLedger(tmp_path).newest_verified().entry.manifest.world_size == 2


def choose(rank, root, content):
    with distributed(timeout_s=120) as parallel:
        decision = choose_checkpoint(CheckpointLedger(root), parallel.world, content=content, timeout_s=120.0)
        return decision.step, [(skipped.step, skipped.reason) for skipped in decision.skipped]


def test_ranks_share_the_reading_and_agree(model_dir, tmp_path):
    for steps in (1, 2):
        run_ranks(2, save, model_dir, tmp_path, steps=steps)
    for name in ("__0_0.distcp", "__1_0.distcp"):  # each is in the share of one rank
        path = tmp_path / "step-000002" / "trainer" / name
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        for step, ((skipped, reason),) in run_ranks(2, choose, tmp_path, True):
            assert (step, skipped) == (1, 2)
            assert f"{name} does not have the content" in reason
        path.write_bytes(data)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert run_ranks(2, choose, tmp_path, False) == [(2, [])] * 2  # that is not what was asked


def test_an_orchestrator_that_fails_leaves_no_entry(model_dir, tmp_path):
    save(0, model_dir, tmp_path, steps=1)
    with pytest.raises(OSError, match="no answer"):
        save(0, model_dir, tmp_path, steps=2, fail=True)
    assert CheckpointLedger(tmp_path).steps() == [1]
    assert list(tmp_path.glob(".*/*")) == []


def test_old_entries_go(model_dir, tmp_path):
    for steps in (1, 2, 3):
        save(0, model_dir, tmp_path, steps=steps)
    assert CheckpointLedger(tmp_path).steps() == [2, 3]


def test_another_model_is_refused(model_dir, tmp_path):
    save(0, model_dir, tmp_path)
    other = write_model_dir(tmp_path / "other", tiny_arch(hidden_size=16))
    deeper = write_model_dir(tmp_path / "deeper", tiny_arch(num_hidden_layers=3))
    for path in (other, deeper):
        with pytest.raises(CheckpointError, match="does not fit the model"):
            load(0, path, tmp_path)


def test_a_step_that_contradicts_the_manifest_is_refused(model_dir, tmp_path):
    save(0, model_dir, tmp_path)
    path = tmp_path / "step-000002"
    entry = CheckpointEntry.open(path)
    wrong = CheckpointEntry(path, msgspec.structs.replace(entry.manifest, step=7))
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=9), load_arch(model_dir), parallel, model_dir=None)
        with pytest.raises(CheckpointError, match="holds step 2, its manifest says 7"):
            load_checkpoint(wrong, policy.model, policy.optimizer, parallel)


def test_what_others_could_have_written_is_not_unpickled(model_dir, tmp_path):
    root = tmp_path / "checkpoints"
    root.mkdir(mode=0o755)
    save(0, model_dir, root, steps=1)
    entry = CheckpointLedger(root).newest_verified().entry
    metadata = entry.trainer_dir / ".metadata"
    for path, mode in ((metadata, 0o602), (entry.trainer_dir, 0o722), (entry.path, 0o777), (root, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(CheckpointError, match=rf"{path.name} is writable by others.*\n.*chmod -R go-w"):
            load(0, model_dir, root)
        path.chmod(before)
    load(0, model_dir, root)


def lose_rank_1(rank, model_dir, root):
    """The second rank goes away when the first one has begun to load."""
    entry = CheckpointLedger(root).newest_verified().entry
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=9), load_arch(model_dir), parallel, model_dir=None)
        if rank == 1:
            raise KeyError("the cause")
        load_checkpoint(entry, policy.model, policy.optimizer, parallel)


def test_a_rank_that_goes_away_is_not_taken_for_a_checkpoint_that_does_not_fit(model_dir, tmp_path):
    save(0, model_dir, tmp_path)
    (kind, words), (cause, _) = run_ranks(2, lose_rank_1, model_dir, tmp_path, fails=True)
    assert (kind, cause) == ("PeerLostError", "KeyError")
    assert "another rank of the trainer was lost while" in words
    assert "does not fit" not in words
