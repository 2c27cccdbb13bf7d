"""One step against a loss that is written out rollout by rollout: what it is divided by, and which settings reach it.

The reference knows nothing of packing, ranks, micro-batches or the trainer's loss: each rollout is computed alone, by a
plain model, and the terms of its tokens are added up in a loop.
"""

import pytest
import torch
from test_meshes import ARCHS
from test_router_replay import rows_of_tokens, with_rows
from trainer_testing import Rollouts, make_recipe, run_ranks, tiny_model, write_model_dir

from hpcrl.config.algorithm import AlgorithmConfig, MaskedRatioLossConfig
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.step.policy import TrainerPolicy

TEMPERATURE = 0.7
STEP = 2
TAU, MASK_LOW, MASK_HIGH = 0.05, 0.004, 0.02
#: of the head: all logits at once, or some tokens at a time
CHUNKS = (None, 4)


def reference(arch):
    """The loss of the whole batch, and its gradient, of one policy in one process."""
    batch, model = Rollouts(STEP), tiny_model(arch)
    loss, masked, sampled, prompts = 0.0, 0, 0, 0
    for rollout in batch.rollouts:
        tokens = torch.from_numpy(rollout.token_ids).long()
        logits = model(tokens, PackedAttention(torch.tensor([0, len(tokens)])).context())
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        for place in range(len(tokens)):
            if not rollout.loss_mask[place]:
                prompts += 1
                continue
            lp = logprobs[place - 1, tokens[place]]
            mu, advantage = float(rollout.logprobs[place]), float(rollout.advantages[place])
            moved = float(lp.detach().exp()) - 2.718281828459045**mu
            cut = (advantage > 0 and moved > MASK_HIGH) or (advantage < 0 and moved < -MASK_LOW)
            loss = loss + TAU * (lp - mu) ** 2 - (0.0 if cut else (lp - mu).exp() * advantage)
            masked, sampled = masked + cut, sampled + 1
    loss = loss / sampled
    loss.backward()
    # or it would not matter what the loss is divided by, nor which mask is whose
    assert prompts > 5
    assert 0 < masked < sampled
    return loss.item(), masked / sampled, {name: p.grad for name, p in model.named_parameters()}


def gradients_of(rank, model_dir, micro_batches=2):
    """Loss, share of masked tokens and the gradients of all ranks together, for each way of the head."""
    found = []
    with distributed(timeout_s=120) as parallel:
        for chunk in CHUNKS:
            recipe = make_recipe(model_dir, steps=9, memory={"lm_head_chunk_tokens": chunk})
            sampling = recipe.rollouts.sampling.model_copy(update={"temperature": TEMPERATURE})
            loss = MaskedRatioLossConfig(kl_tau=TAU, mask_low=MASK_LOW, mask_high=MASK_HIGH)
            changes = {
                "rollouts": recipe.rollouts.model_copy(update={"sampling": sampling}),
                "algorithm": AlgorithmConfig(loss=loss),
            }
            recipe = recipe.model_copy(update=changes)
            policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
            data = parallel.data
            shard = Rollouts(STEP).shard(data.rank, data.size, micro_batches=micro_batches)
            metrics = policy.forward_backward(shard).reduce(parallel.world)
            named = policy.model.named_parameters()
            gradients = {name: parameter.grad.full_tensor().tolist() for name, parameter in named}
            found.append((metrics.loss, metrics.masked_share, gradients))
    return found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("by-hand") / "model")


@pytest.fixture(scope="module")
def wanted(model_dir):
    return reference(load_arch(model_dir))


def assert_by_hand(found, wanted):
    loss, masked, gradients = wanted
    for own_loss, own_masked, own in found:
        assert own_loss == pytest.approx(loss, rel=1e-4)
        assert own_masked == pytest.approx(masked)
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(torch.tensor(own[name]), gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_is_that_of_a_loss_by_hand(model_dir, wanted, micro_batches):
    assert_by_hand(gradients_of(0, model_dir, micro_batches), wanted)


def test_two_ranks_and_two_micro_batches_make_the_gradient_by_hand(model_dir, wanted):
    for found in run_ranks(2, gradients_of, model_dir):
        assert_by_hand(found, wanted)


# -- what is counted where ranks share rollouts

COUNTED = ("tokens", "routed_tokens", "routes_bytes", "replayed_share", "unknown_routing", "rollouts_digest")


def counts_of(rank, model_dir, arch, cp):
    with distributed(timeout_s=120) as start:
        mesh = ParallelDims(world_size=start.world.size, cp=cp)
        mesh.build_mesh("cpu")
        parallel = Parallel(mesh, start.device)
        recipe = make_recipe(model_dir, steps=9, router_replay=True)
        policy = TrainerPolicy(recipe, arch, parallel, model_dir=model_dir)
        shard = Rollouts(STEP).shard(parallel.data.rank, parallel.data.size)
        # some tokens have no row, and the rows of the others weigh something
        shard = with_rows(shard, rows_of_tokens(arch), missing=3)
        metrics = policy.forward_backward(shard).reduce(parallel.world)
        return {name: getattr(metrics, name) for name in COUNTED}


def test_ranks_of_a_context_count_their_rollouts_once(tmp_path):
    arch = ARCHS["qwen3_moe"]
    model_dir = write_model_dir(tmp_path / "model", arch)
    wanted = counts_of(0, model_dir, arch, 1)
    assert wanted["unknown_routing"]
    assert wanted["routes_bytes"] > 0
    for found in run_ranks(2, counts_of, model_dir, arch, 2):
        assert found == wanted
