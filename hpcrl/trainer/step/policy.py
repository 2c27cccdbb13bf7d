"""The policy under training: model, optimizer, and what one optimizer step does with a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hpcrl.config.recipe import Recipe
from hpcrl.dock.wire import BatchShard
from hpcrl.errors import RunFailedError, UsageError
from hpcrl.modeling.hf import load_hf_tensors
from hpcrl.modeling.qwen3_moe import Qwen3Moe
from hpcrl.models.arch import ModelArch
from hpcrl.trainer.batch.routed_experts import RoutedExpertsComparison
from hpcrl.trainer.batch.tensors import TokenBatch, token_logprobs
from hpcrl.trainer.parallel.mesh import Parallel, shard_model
from hpcrl.trainer.step.losses import TrainedTokens, policy_loss
from hpcrl.trainer.step.metrics import TokenSums
from hpcrl.trainer.step.optim import clip_gradients, learning_rate, make_optimizer, set_learning_rate

__all__ = ["TrainerPolicy", "load_start_model", "read_model_tensors"]


def read_model_tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a Hugging Face model directory, one at a time.

    Raises
    ------
    UsageError
        The directory has no safetensors files.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{model_dir} has no *.safetensors: it is not a model directory")
    for path in files:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                yield name, shard.get_tensor(name)


def load_start_model(model: Qwen3Moe, model_dir: Path) -> None:
    """Fill a whole ``model`` from a model directory (ValueError names the file where it does not fit)."""
    try:
        load_hf_tensors(model, model.arch, read_model_tensors(model_dir))
    except ValueError as error:
        raise ValueError(f"{model_dir}: {error}") from error


class TrainerPolicy:
    """Sharded model and optimizer, and the steps they make. All ranks call every method together."""

    def __init__(self, recipe: Recipe, arch: ModelArch, parallel: Parallel, *, model_dir: Path | None) -> None:
        """Build the model and shard it.

        Parameters
        ----------
        recipe:
            Loss, optimizer, dtype and number of steps.
        arch:
            Of the model.
        parallel:
            The ranks.
        model_dir:
            Where the weights come from; None leaves them unset, for a checkpoint to fill.
        """
        self.recipe, self.arch, self.parallel = recipe, arch, parallel
        with torch.device("meta") if model_dir is None else torch.device("cpu"):
            self.model = Qwen3Moe(arch)
        if model_dir is None:
            self.model.to_empty(device="cpu")
            self.model.tie_weights()
        else:
            load_start_model(self.model, model_dir)
        self.model.to(parallel.device)
        shard_model(self.model, parallel.mesh, dtype=getattr(torch, recipe.trainer.dtype))
        self.optimizer = make_optimizer(self.model.parameters(), recipe.trainer.optimizer)

    def forward_backward(self, shard: BatchShard) -> TokenSums:
        """Add the gradient of this rank's micro-batches to ``grad``; returns sums of this rank.

        Raises
        ------
        ValueError
            The shard does not keep the dock's contract.
        """
        sums = TokenSums(shard.step - 1)
        for micro_batch in shard.micro_batches:
            batch = TokenBatch.from_wire(micro_batch, self.parallel.device)
            comparison = None if batch.routes is None else RoutedExpertsComparison(batch.routes)
            logits = self.model(
                batch.input_ids, batch.positions, batch.attention, select=batch.select, record=comparison
            )
            if comparison is not None:
                comparison.finish()
                sums.add_routes(comparison, batch)
            if not batch.num_trained:
                # other ranks may have data: join their collectives with a gradient of zero
                (logits.sum() * 0.0).backward()
                continue
            logprobs, entropies = token_logprobs(logits, batch.targets, self.recipe.rollouts.sampling.temperature)
            tokens = TrainedTokens(logprobs, batch.engine_logprobs, batch.advantages, batch.sequences)
            loss = policy_loss(tokens, self.recipe.algorithm.loss, total_tokens=shard.stats.total_sampled_tokens)
            loss.loss.backward()  # type: ignore[no-untyped-call]
            sums.add(loss, entropies, batch.versions, batch.context_versions)
        return sums

    def optimizer_step(self, step: int) -> tuple[float, float]:
        """Clip, update, and forget gradients; returns the gradient norm before clipping and the learning rate.

        Raises
        ------
        RunFailedError
            The gradient is not finite; the weights are as before.
        """
        config = self.recipe.trainer.optimizer
        norm = clip_gradients(self.model.parameters(), config.max_grad_norm, self.parallel.fsdp_group)
        if not norm < float("inf"):
            raise RunFailedError(
                f"the gradient norm of step {step} is {norm}; the weights were left as they are\n"
                "    hint: a lower trainer.optimizer.learning_rate, then resume from the last checkpoint"
            )
        rate = learning_rate(config, step, self.recipe.trainer.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, rate
