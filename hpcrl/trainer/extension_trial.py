"""Try extensions of the trainer before a run: ``python -m hpcrl.trainer.extension_trial < request.json``.

It prints one JSON document with ``findings`` (``key``, ``what`` and ``hint`` of each extension that cannot be used).
`hpcrl.jobplan.extension_trial` calls it with the interpreter of the trainer, and with that of embedded engines for the
family of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from hpcrl.config.algorithm import CustomLossConfig
from hpcrl.config.recipe import Recipe
from hpcrl.extend import ExtensionError, call_extension
from hpcrl.modeling.spec import spec_of
from hpcrl.models.arch import load_arch
from hpcrl.trainer.publish.custom_sync import find_factory
from hpcrl.trainer.step.losses import make_loss, policy_loss
from hpcrl.trainer.token_loss import TokenLoss, TrainedTokens

_TOKENS, _ROLLOUTS = 12, 3


def find_problems(recipe: Recipe, kinds: Sequence[str]) -> list[dict[str, str]]:
    """Try extensions that the recipe names, all of them also where one fails.

    Parameters
    ----------
    kinds:
        Which of ``loss``, ``transport`` and ``family`` to try.
    """
    loss, sync = recipe.algorithm.loss, recipe.handoff.sync
    trials: dict[str, tuple[str, Callable[[], object]]] = {"family": ("model.path", lambda: check_family(recipe))}
    if isinstance(loss, CustomLossConfig):
        trials["loss"] = ("algorithm.loss", lambda: check_loss(loss))
    if sync is not None:
        trials["transport"] = ("handoff.sync", lambda: find_factory(sync))
    findings = []
    for key, attempt in (trials[kind] for kind in kinds):
        try:
            attempt()
        except ExtensionError as error:
            findings.append({"key": key, "what": error.what, "hint": error.hint})
    return findings


def check_family(recipe: Recipe) -> None:
    """Build the model of the recipe without memory for its weights.

    Raises
    ------
    ExtensionError
        Its family is that of another package, and cannot be imported or built.
    """
    arch = load_arch(Path(recipe.model.path))
    spec = spec_of(arch)
    name = type(arch).__name__
    call_extension(f"the model of {name}", lambda: spec.build(arch), "see docs/extending.md")


def check_loss(config: CustomLossConfig) -> None:
    """Make a loss, and compute it on a few tokens and on none, with a backward pass.

    Raises
    ------
    ExtensionError
        It cannot be made, raises, or gives no finite loss and gradient; or its terms depend on other tokens although
        it does not need whole rollouts.
    """
    loss = make_loss(config)
    path = f"{type(loss).__module__}:{type(loss).__qualname__}"
    total, gradient = _computed(loss, path, slice(None))
    if not (total.isfinite() and gradient.isfinite().all()):
        hint = "look at what it divides by and exponentiates"
        raise ExtensionError(f"{path} has no finite loss and gradient for ordinary tokens", hint)
    nothing, _ = _computed(loss, path, slice(0, 0))
    if nothing != 0:
        raise ExtensionError(f"{path} is {float(nothing):g} for no tokens at all", "return terms of shape [0]")
    if "whole_sequences" not in loss.needs:
        parts = [_computed(loss, path, part) for part in (slice(0, 5), slice(5, _TOKENS))]
        if not torch.allclose(torch.cat([part[1] for part in parts]), gradient, rtol=1e-4, atol=1e-6):
            what = f"{path} gives a token another gradient where other tokens are left out"
            raise ExtensionError(what, "declare needs = frozenset({'whole_sequences'}), and repeat it in the recipe")


def _computed(loss: TokenLoss, path: str, part: slice) -> tuple[Tensor, Tensor]:
    """Return the loss of a part of some tokens, and its gradient for each of them."""
    generator = torch.Generator().manual_seed(0)
    engine = -torch.rand(_TOKENS, generator=generator) * 3 - 0.05
    drift = torch.randn(_TOKENS, generator=generator) * 0.1
    logprobs = (engine + drift).clamp(max=-0.01)[part].clone().requires_grad_()
    sequences = torch.arange(_TOKENS) * _ROLLOUTS // _TOKENS
    advantages = torch.tensor([1.0, -0.5, 0.0])[sequences]
    reference = (engine - 0.1)[part] if "reference" in loss.needs else None
    # the last rollout has no scores: it was finished before the run had a teacher
    unknown = torch.where(sequences == _ROLLOUTS - 1, float("nan"), 0.0)
    teacher = (engine + 0.1 + unknown)[part] if "teacher" in loss.needs else None
    tokens = TrainedTokens(
        logprobs,
        engine[part],
        advantages[part],
        sequences[part],
        _ROLLOUTS,
        reference_logprobs=reference,
        teacher_logprobs=teacher,
    )
    hint = "see hpcrl.trainer.token_loss.TokenLoss"
    found = call_extension(f"{path}.terms", lambda: policy_loss(tokens, loss, total_tokens=_TOKENS), hint)
    if not found.loss.requires_grad:
        raise ExtensionError(f"{path} has no gradient", "compute with tokens.logprobs or log_ratio, not detached")
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    return found.loss.detach(), gradient


def main() -> None:
    """Read a recipe from the standard input and print the answer."""
    answer, sys.stdout = sys.stdout.buffer, sys.stderr  # extensions may print
    request: dict[str, Any] = msgspec.json.decode(sys.stdin.buffer.read())
    recipe = Recipe.model_validate_json(msgspec.json.encode(request["recipe"]))
    answer.write(msgspec.json.encode({"findings": find_problems(recipe, request["kinds"])}) + b"\n")


if __name__ == "__main__":
    main()
