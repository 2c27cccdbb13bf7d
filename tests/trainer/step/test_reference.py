"""The penalty on the distance from the start model: its value and gradient, and the model that it is asked of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from losses_lab import token_loss
from test_meshes import MODELS
from torch import Tensor
from trainer_testing import Rollouts, make_recipe, run_ranks, tiny_arch, write_model_dir

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.config.algorithm import AlgorithmConfig, KlConfig
from hpcrl.config.recipe import CheckpointConfig, TrainerParallelismConfig
from hpcrl.models.arch import load_arch
from hpcrl.trainer.batch.tensors import TokenBatch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.state.saver import CheckpointSaver
from hpcrl.trainer.step.losses import TrainedTokens, policy_loss
from hpcrl.trainer.step.policy import TrainerPolicy

VOCAB = 9
KINDS: tuple[Any, ...] = ("weighted_k3", "k3")
NO_LOSS = token_loss("ppo_clip", clip_low=1e6, clip_high=1e6)


def penalty(scores: Tensor, engine: Tensor, reference: Tensor, config: KlConfig) -> Tensor:
    """The penalty on every token of a vocabulary, weighted as an engine samples them: its mean over many samples."""
    logprobs = scores.log_softmax(-1)
    found = [
        policy_loss(
            TrainedTokens(
                logprobs[token, None],
                engine[token, None],
                torch.zeros(1),
                torch.zeros(1, dtype=torch.int64),
                1,
                reference_logprobs=reference[token, None],
            ),
            NO_LOSS,
            total_tokens=1,
            kl=config,
        ).loss
        for token in range(VOCAB)
    ]
    return (engine.exp() * torch.stack(found)).sum()


def drawn(seed: int) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("same", [True, False])
def test_the_weighted_estimate_has_value_and_gradient_of_the_divergence(same: bool) -> None:
    """Also of tokens that another policy sampled; k3 without the weight has neither."""
    scores, reference = drawn(0).requires_grad_(), drawn(1).log_softmax(-1)
    engine = scores.detach().log_softmax(-1) if same else drawn(2).log_softmax(-1)
    policy = scores.log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, scores)
    found = {kind: penalty(scores, engine, reference, KlConfig(coefficient=1.0, estimator=kind)) for kind in KINDS}
    gradients = {kind: torch.autograd.grad(value, scores)[0] for kind, value in found.items()}
    torch.testing.assert_close(found["weighted_k3"], exact)
    torch.testing.assert_close(gradients["weighted_k3"], wanted)
    assert (float(found["k3"].detach()) == pytest.approx(float(exact.detach()))) == same
    assert not torch.allclose(gradients["k3"], wanted, rtol=0.05)


def test_the_coefficient_weighs_it_against_the_loss() -> None:
    tokens = TrainedTokens(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-1.0, -2.0]),
        torch.tensor([0.5, -0.5]),
        torch.tensor([0, 0]),
        1,
        reference_logprobs=torch.tensor([-1.5, -1.0]),
    )
    by_hand = sum(math.exp(d) - 1 - d for d in (-0.5, 1.0)) / 8
    plain = policy_loss(tokens, token_loss(), total_tokens=8)
    for kind in KINDS:
        found = policy_loss(tokens, token_loss(), total_tokens=8, kl=KlConfig(coefficient=0.3, estimator=kind))
        assert float(found.loss - plain.loss) == pytest.approx(0.3 * by_hand, rel=1e-5)


@pytest.mark.parametrize("estimator", KINDS)
def test_what_lies_far_apart_stays_finite(estimator: Any) -> None:
    logprobs = torch.tensor([-90.0, -0.1], requires_grad=True)
    tokens = TrainedTokens(
        logprobs,
        torch.tensor([-0.1, -90.0]),
        torch.zeros(2),
        torch.tensor([0, 0]),
        1,
        reference_logprobs=torch.tensor([-0.1, -90.0]),
    )
    found = policy_loss(tokens, token_loss(), total_tokens=2, kl=KlConfig(coefficient=1.0, estimator=estimator))
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    assert found.loss.isfinite()
    assert gradient.isfinite().all()


def new_policy(model_dir: Path, parallel: Parallel, kl: dict[str, Any] | None, **trainer: Any) -> TrainerPolicy:
    recipe = make_recipe(model_dir, steps=9, **{"optimizer": {"learning_rate": 2e-3}, **trainer})
    algorithm = AlgorithmConfig.model_validate({"kl": kl})
    recipe = recipe.model_copy(update={"algorithm": algorithm})
    return TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)


def train(policy: TrainerPolicy, steps: int = 8) -> list[float | None]:
    """Train some steps on one batch, and return the distance from the start model before each."""
    data, found = policy.parallel.data, []
    for step in range(1, steps + 1):
        sums = policy.forward_backward(Rollouts(1).shard(data.rank, data.size))
        found.append(sums.reduce(policy.parallel.world).reference_kl)
        policy.optimizer_step(step)
    return found


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"memory": {"lm_head_chunk_tokens": 4, "activation_checkpointing": "full"}},
        {"memory": {"parameter_offload": True}},
        {"lora": {"rank": 4, "alpha": 8.0}},
    ],
    ids=["plain", "in pieces", "on the host", "adapters"],
)
def test_the_reference_is_the_start_model_and_holds_the_policy(tmp_path: Path, trainer: dict[str, Any]) -> None:
    model_dir = write_model_dir(tmp_path / "model", tiny_arch())
    with distributed(timeout_s=60.0) as parallel:
        start = new_policy(model_dir, parallel, None, **trainer)
        batch = TokenBatch.from_wire(Rollouts(1).shard().micro_batches[0])
        policy = new_policy(model_dir, parallel, {"coefficient": 1e-9}, **trainer)
        assert train(start) == [None] * 8
        distances = train(policy)
        fresh = new_policy(model_dir, parallel, None, **trainer)
        # after training the reference is what it was at the start
        torch.testing.assert_close(
            policy.reference.logprobs(batch), fresh._unreplayed(batch) + batch.engine_logprobs, rtol=0, atol=1e-6
        )
        held = train(new_policy(model_dir, parallel, {"coefficient": 100.0, "estimator": "k3"}, **trainer))
    assert distances[0] == pytest.approx(0.0, abs=1e-9)
    # a penalty that weighs next to nothing changes nothing, and what it measures grows as the policy moves
    assert distances[-1] > 0.01
    assert held[-1] < 0.3 * distances[-1]


def on_ranks(
    rank: int, model_dir: Path, degrees: dict[str, int], more: dict[str, Any]
) -> tuple[list[Any], list[float]]:
    with distributed(timeout_s=60.0, parallelism=TrainerParallelismConfig(**degrees)) as parallel:
        policy = new_policy(model_dir, parallel, {"coefficient": 0.5, **more}, parallelism=degrees)
        distances = train(policy, 2)
        shard = Rollouts(3).shard(parallel.data.rank, parallel.data.size)
        return distances, policy.forward_backward(shard).reduce(parallel.world).loss


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"cp": 2}, {}], ids=str)
def test_two_ranks_compute_what_one_does(tmp_path: Path, degrees: dict[str, int]) -> None:
    model_dir = write_model_dir(tmp_path / "model", MODELS["qwen3_moe"])
    with distributed(timeout_s=60.0) as parallel:
        alone = new_policy(model_dir, parallel, {"coefficient": 0.5})
        wanted = train(alone, 2)
        loss = alone.forward_backward(Rollouts(3).shard()).reduce(parallel.world).loss
    for found, own in run_ranks(2, on_ranks, model_dir, degrees, {"on_host": degrees == {"ep": 2}}):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)
        assert own == pytest.approx(loss, rel=1e-3)


def test_a_penalty_in_the_reward_is_one_of_the_advantages() -> None:
    scores, reference = drawn(0).requires_grad_(), drawn(1).log_softmax(-1)
    logprobs = scores.log_softmax(-1)
    config = KlConfig(coefficient=0.3, applied_to="reward")
    tokens = TrainedTokens(
        logprobs, logprobs.detach(), torch.linspace(-1, 1, VOCAB), torch.zeros(VOCAB, dtype=torch.int64), 1
    )
    held = tokens.advantages - 0.3 * (logprobs.detach() - reference)
    wanted = policy_loss(tokens._replace(advantages=held), token_loss(), total_tokens=VOCAB)
    found = policy_loss(tokens._replace(reference_logprobs=reference), token_loss(), total_tokens=VOCAB, kl=config)
    torch.testing.assert_close(found.loss, wanted.loss)


def test_on_policy_its_gradient_is_that_of_the_divergence() -> None:
    scores, reference = drawn(0).requires_grad_(), drawn(1).log_softmax(-1)
    policy = scores.log_softmax(-1)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), scores)
    config = KlConfig(coefficient=1.0, applied_to="reward")
    (found,) = torch.autograd.grad(penalty(scores, policy.detach(), reference, config), scores)
    torch.testing.assert_close(found, wanted)
    far = TrainedTokens(
        torch.tensor([-90.0]),
        torch.tensor([-90.0]),
        torch.zeros(1),
        torch.tensor([0]),
        1,
        reference_logprobs=torch.tensor([-0.1]),
    )
    assert float(policy_loss(far, NO_LOSS, total_tokens=1, kl=config).loss) == pytest.approx(-20.0)


REFRESHED = {"coefficient": 1e-3, "reference_every_steps": 3}


def distances(rank: int, model_dir: Path, root: Path, degrees: dict[str, int], steps: range) -> list[Any]:
    """Train some steps, from the checkpoint before them if there is one; save after the last."""
    with distributed(timeout_s=60.0, parallelism=TrainerParallelismConfig(**degrees)) as parallel:
        policy = new_policy(model_dir, parallel, REFRESHED, parallelism=degrees)
        if steps[0] > 1:
            entry = CheckpointLedger(root).newest_verified().entry
            assert entry is not None
            load_checkpoint(entry, policy.model, policy.optimizer, parallel, reference=policy.reference)
        found = []
        for step in steps:
            sums = policy.forward_backward(Rollouts(step).shard(parallel.data.rank, parallel.data.size))
            assert policy.reference is not None
            found.append((policy.reference.version, sums.reduce(parallel.world).reference_kl))
            policy.optimizer_step(step)
        writer = parallel.world.on_leader(lambda: CheckpointWriter.claim(root, steps[0]), "claiming")
        saver = CheckpointSaver(writer, parallel.world, CheckpointConfig(), lambda kind, **data: None)
        saver.start(policy, steps[-1], orchestrator_state=lambda: b"")
        assert saver.wait(30.0) is None
        return found


def test_the_reference_follows_the_policy_at_its_interval(tmp_path: Path) -> None:
    model_dir = write_model_dir(tmp_path / "model", tiny_arch())
    found = distances(0, model_dir, tmp_path / "checkpoints", {}, range(1, 9))
    assert [version for version, _ in found] == [0, 0, 0, 3, 3, 3, 6, 6]
    # at the first step with a reference the policy is it
    assert [step for step, (_, kl) in enumerate(found, 1) if abs(kl) < 1e-9] == [1, 4, 7]


@pytest.mark.parametrize("before", [2, 3, 4, 5])
def test_a_resumed_run_has_the_reference_of_one_without_a_break(tmp_path: Path, before: int) -> None:
    model_dir = write_model_dir(tmp_path / "model", tiny_arch())
    wanted = distances(0, model_dir, tmp_path / "whole", {}, range(1, 8))
    root = tmp_path / "parts"
    first = distances(0, model_dir, root, {}, range(1, before + 1))
    assert first + distances(0, model_dir, root, {}, range(before + 1, 8)) == wanted


def test_a_reference_is_restored_on_other_ranks(tmp_path: Path) -> None:
    model_dir = write_model_dir(tmp_path / "model", tiny_arch())
    root = tmp_path / "checkpoints"
    wanted = distances(0, model_dir, tmp_path / "whole", {}, range(1, 7))
    run_ranks(2, distances, model_dir, root, {"ep": 2}, range(1, 5))
    (found, _) = run_ranks(2, distances, model_dir, root, {}, range(5, 7))
    assert [version for version, _ in found] == [version for version, _ in wanted[4:]]
    assert [kl for _, kl in found] == pytest.approx([kl for _, kl in wanted[4:]], rel=1e-2)
