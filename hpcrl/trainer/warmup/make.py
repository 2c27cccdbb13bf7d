"""Makes a small start model: random weights, a character tokenizer, and supervised steps on demonstrations.

``python -m hpcrl.trainer.warmup.make --output DIR < recipe.json`` is what ``hpcrl warmup`` calls.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F

from hpcrl.config.recipe import OptimizerConfig, Recipe, WarmupConfig
from hpcrl.errors import HpcrlError, UsageError, refusal
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import arch_from_config
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.generation_config import GenerationConfig
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.reporting.screen_text import visible
from hpcrl.rollouts.environments import build_environments, hosted
from hpcrl.storage import lost_replies
from hpcrl.storage.files import StagedDirectory, write_json
from hpcrl.trainer.publish.publisher import tensor_bytes
from hpcrl.trainer.step.optim import clip_gradients, learning_rate, make_optimizer, set_learning_rate
from hpcrl.trainer.warmup.demonstrations import DemonstrationSource
from hpcrl.weights.format.shard import write_shard

_MAX_GRAD_NORM = 1.0
_RISE_SHARE = 0.1
"""Share of the steps in which the learning rate rises."""

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)
"""Common keys of ``model.warmup`` for models of any family."""

Progress = Callable[[int, int, float], None]
"""Called after each step with the step (from 1), the number of steps, and the loss in nats per token."""


def make_start_model(
    recipe: Recipe, output: Path, *, seed: int, progress: Progress | None = None, replace: bool = False
) -> float:
    """Make the model that ``recipe.model.warmup`` describes, in one process on the CPU.

    ``output`` appears at once when all is done: a Hugging Face model directory with ``config.json``, tokenizer
    and ``model.safetensors``.

    Parameters
    ----------
    recipe:
        Model sizes, environments and their weights.
    output:
        The directory to make.
    seed:
        Seed of weights and demonstrations; equal arguments give equal models.
    progress:
        Called after every step.
    replace:
        Whether to replace an existing directory.

    Returns
    -------
    float
        Mean loss of the last tenth of the steps, in nats a token.

    Raises
    ------
    UsageError
        The recipe has no warm-up, ``output`` exists, or an environment has no demonstrations.
    """
    config = recipe.model.warmup
    if config is None:
        raise UsageError(f"recipe {recipe.name} has no model.warmup: it uses an existing model")
    if output.exists() and not replace:
        raise UsageError(f"{output} exists already\n    hint: use it as it is, remove it, or replace it (--replace)")
    stage = StagedDirectory(output, token=f"warmup-{os.getpid()}")
    processes = ExitStack()
    try:
        stage.create()
        vocab_size, eos_token_id = write_character_tokenizer(stage.path, chat=config.chat, words=config.words)
        model = _build(config, vocab_size, eos_token_id)
        tokenizer = ChatTokenizer(stage.path)
        environments = build_environments(recipe)
        for environment in hosted(environments):
            processes.callback(environment.close)
        source = DemonstrationSource(
            environments,
            [environment.weight for environment in recipe.environments],
            tokenizer,
            correct_share=config.correct_share,
            seed=seed,
            ends=frozenset(GenerationConfig.read(stage.path).eos_token_ids),
        )
        model.init_weights(torch.Generator().manual_seed(seed), config.initializer_range)
        loss = _train(model, source, config, progress)
        _write_model(stage.path, model)
        _appear(stage)
    except BaseException:
        stage.discard()
        raise
    finally:
        processes.close()
    return loss


def _build(config: WarmupConfig, vocab_size: int, eos_token_id: int) -> Decoder:
    """Build the model of the configured sizes, as a ``config.json`` of the family (UsageError if invalid)."""
    sizes = {name: getattr(config, name) for name in _SIZES}
    # families have names of their own for these
    sizes |= dict.fromkeys(("n_routed_experts", "num_local_experts"), config.num_experts)
    sizes |= {"intermediate_size": config.moe_intermediate_size}
    given = {"model_type": config.family, "vocab_size": vocab_size, "eos_token_id": eos_token_id}
    try:
        arch = arch_from_config(sizes | config.config | given)
        if wrong := config.config.keys() & given.keys() or config.config.keys() - arch.to_hf_config().keys():
            raise ValueError(f"config has {', '.join(sorted(wrong))}, which does not apply to {config.family} there")
        return build_model(arch, device="cpu")
    except (ValueError, TypeError) as error:
        raise UsageError(f"model.warmup is not a valid model: {error}\n    hint: correct model.warmup") from error


def _train(model: Decoder, source: DemonstrationSource, config: WarmupConfig, progress: Progress | None) -> float:
    """Minimise the cross entropy of the assistant's tokens; return the mean loss of the last tenth."""
    schedule = OptimizerConfig(
        learning_rate=config.learning_rate, schedule="cosine", warmup_steps=round(config.steps * _RISE_SHARE)
    )
    optimizer = make_optimizer(model.named_parameters(), schedule)
    losses: list[float] = []
    for step in range(1, config.steps + 1):
        try:
            batch = source.batch(config.batch_size)
        except NotImplementedError as error:
            raise UsageError(f"an environment of the recipe has no demonstrations to warm up on: {error}") from error
        logits = model(batch.input_ids, batch.attention.context(batch.select))
        loss = F.cross_entropy(logits, batch.targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_gradients(model.parameters(), _MAX_GRAD_NORM, None)
        set_learning_rate(optimizer, learning_rate(schedule, step, config.steps))
        optimizer.step()
        losses.append(loss.item())
        if progress is not None:
            progress(step, config.steps, losses[-1])
    last = losses[-max(1, config.steps // 10) :]
    return sum(last) / len(last)


def _write_model(path: Path, model: Decoder) -> None:
    tensors = [
        tensor_bytes(hf_name, tensor, torch.float32) for hf_name, tensor in published_tensors(model, model.adapter)
    ]
    write_shard(path / "model.safetensors", tensors)
    write_json(path / "config.json", model.arch.to_hf_config())


def _appear(stage: StagedDirectory) -> None:
    """Rename into place; an old directory is moved away first and restored if that fails."""
    old = StagedDirectory(stage.target, token=f"replaced-{os.getpid()}")
    replaced = stage.target.exists()
    if replaced:
        lost_replies.rename(stage.target, old.path)
    try:
        stage.commit()
    except BaseException:
        if replaced:
            lost_replies.rename(old.path, stage.target)
        raise
    old.discard()


def _print_progress(step: int, steps: int, loss: float) -> None:
    if step % max(1, steps // 10) == 0 or step == 1:
        print(f"warm-up step {step}/{steps}: loss {loss:.3f}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the command line; the result, the final loss, goes to stdout."""
    parser = argparse.ArgumentParser(prog="python -m hpcrl.trainer.warmup.make", description=__doc__)
    parser.add_argument("--recipe", default="-", help="resolved recipe as JSON; - reads standard input")
    parser.add_argument("--output", type=Path, required=True, help="model directory to make")
    parser.add_argument("--replace", action="store_true", help="replace a model that is already there")
    arguments = parser.parse_args()
    text = sys.stdin.read() if arguments.recipe == "-" else Path(arguments.recipe).read_text(encoding="utf-8")
    recipe = Recipe.model_validate_json(text)
    # exit through exceptions, so that a partial output is removed
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    torch.set_num_threads(recipe.trainer.threads)
    try:
        loss = make_start_model(
            recipe, arguments.output, seed=recipe.seed, progress=_print_progress, replace=arguments.replace
        )
    except (HpcrlError, OSError) as error:
        known = refusal(error) if isinstance(error, OSError) else error
        if known is None:
            raise
        print(visible(f"error: {known}"), file=sys.stderr)
        return int(known.exit_code)
    print(f"{arguments.output}: supervised loss {loss:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
